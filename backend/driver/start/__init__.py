"""The start of a run: its inputs are read, checked and restored before anything runs."""
