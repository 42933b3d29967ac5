"""The description of a run: the typed recipe (``schema``), its loader (``load``) and the bundled recipes.

This package imports neither torch nor any other package of Slipstream, so that ``slipstream check`` is fast.
"""
