"""Recipes from configurations of other systems: ``slipstream import``.

files ──► keys and values ──► a table: mapped, ours by default, refused ──► loader, which may refuse more
"""
