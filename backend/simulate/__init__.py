"""The loops and the control core of a run under a virtual clock, on models of engines, trainer and rewards.

world      one run: the real loops, and models of all that they wait for
compare    the same work under several schedules and on several splits of the GPUs
fit        the models' constants, from the trace of a real run
command    ``slipstream simulate``
"""

from typing import Any


def only_simulated(**_: Any) -> None:
    """The ``prepare`` of recipes that have neither model nor prompts: they can be simulated, not trained."""
    raise SystemExit("this recipe has neither model nor prompts: it is for `slipstream simulate` only")
