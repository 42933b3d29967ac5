"""Hooks written for slime, run unchanged. A leaf: ``rollout.compat.hooks`` alone names it, by import paths.

``alias/`` holds the package ``slime`` that hooks import where no checkout of slime is importable. The other
modules are Slipstream's side of the contract.
"""

import importlib.util
import sys
from pathlib import Path

ALIAS = Path(__file__).with_name("alias")
"""Folder that holds the package ``slime`` with the names that hooks import."""


def make_slime_importable() -> bool:
    """Put the alias at the end of the import path. Return whether it is used: a checkout goes before it."""
    if "slime" not in sys.modules and str(ALIAS) not in sys.path:
        sys.path.append(str(ALIAS))
    spec = importlib.util.find_spec("slime")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return str(ALIAS / "slime") in places
