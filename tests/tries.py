"""How many examples a property is tried with: few in ``make test``, many in ``make property-sweep``."""

import os
from typing import Any

from hypothesis import settings

FACTOR = float(os.environ.get("TRIES_FACTOR", 1))
"""What multiplies the examples of every property of the unit tests."""
EXAMPLES = 35
"""Of a property that asks for no number of its own."""


def tries(examples: int, **options: Any) -> settings:
    """Return hypothesis' settings for a property that is tried with so many examples in ``make test``."""
    return settings(max_examples=max(1, round(examples * FACTOR)), **options)


def profile(parent: settings) -> settings:
    """Return the settings of all other properties. An example may wait for a busy core."""
    return settings(parent, max_examples=max(1, round(EXAMPLES * FACTOR)), deadline=None)
