"""Agents as their users install them, against a gateway whose policy follows a script."""
