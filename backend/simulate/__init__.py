"""Runs the loops and the control core in virtual time, on models of engines, trainer and rewards.

world      one run: the real loops, and models of everything that they wait for
compare    the same work under several schedules and on several splits of the GPUs
fit        the models' constants, from the trace of a real run
command    ``slipstream simulate``; inputs: what it reads
report     its tables and its JSON document; picture: its timeline
"""


def only_simulated(**_: object) -> None:
    """Serve as ``prepare`` of a recipe without model and prompts, which can be simulated but not trained."""
    raise SystemExit("this recipe has neither model nor prompts: it is for `slipstream simulate` only")
