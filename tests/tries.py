"""The number of examples that hypothesis draws: few in ``make test``, ten times as many in its sweep."""

import os
from typing import Any

from hypothesis import settings

FACTOR = float(os.environ.get("TRIES_FACTOR", 1))
"""Multiplies the examples in the unit tests."""
EXAMPLES = 35
"""For a property that sets no number itself."""


def tries(examples: int, parent: settings | None = None, **options: Any) -> settings:
    """Return settings with so many examples in ``make test``. ``parent`` has what is not given."""
    return settings(parent, max_examples=max(1, round(examples * FACTOR)), **options)
