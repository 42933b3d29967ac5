"""Hooks written for slime, run unchanged. No other room knows slime.

``alias/`` holds the package ``slime`` that hooks import where no checkout of slime is importable. The other
modules are Slipstream's side of the contract.
"""
