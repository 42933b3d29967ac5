"""Reasons why the reward of a run may not rise: evidence from its files, signs in it, and their causes."""
