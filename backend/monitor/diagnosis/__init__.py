"""What may keep the reward of a run from rising: evidence from its files, its signs, and their causes."""
