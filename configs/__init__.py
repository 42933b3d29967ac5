"""What a run is: the typed recipe (``schema``), how it is read (``load``) and the recipes themselves.

Imports no torch and nothing of the other packages, so ``slipstream check`` answers in a moment.
"""
