"""Hooks written for slime on the ranks of the trainer. Imported only where a recipe names such hooks.

A leaf: ``backend.trainer.hooks`` holds the import path of ``make_rank_hooks``, and nothing else does.
"""
