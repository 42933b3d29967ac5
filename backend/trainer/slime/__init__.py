"""Hooks written for slime on the ranks of the trainer. Imported only where a recipe names such hooks.

The rest of the trainer knows ``RankHooks`` alone (``rank_hooks``), and only as None or something to ask.
"""
