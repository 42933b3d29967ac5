"""Runs of other kinds: one half alone, serving alone, supervised training, a few episodes to look at."""
