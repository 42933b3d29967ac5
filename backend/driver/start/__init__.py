"""What is read, checked and restored before anything runs."""
