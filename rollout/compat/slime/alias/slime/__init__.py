"""The names that hooks written for slime import, over Slipstream's engines and recipe.

Slipstream puts this package on the path of its own processes only, and only where no checkout of slime can be
imported. It holds no copy of slime: the contract is slime's, the code is Slipstream's.
"""
