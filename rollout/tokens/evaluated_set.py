"""The result of an evaluation, as collectors, the driver and hooks hold it."""

import msgspec

from slipstream.rollout.tokens.trajectory import Prompt

HELD_OUT = "held_out"
"""Name of the set of ``eval.path``."""


class EvaluatedSet(msgspec.Struct, array_like=True, gc=False):
    """One set of prompts; each list is over its samples."""

    name: str
    rewards: list[float]
    lengths: list[int]
    """Response tokens; 0 where a function has not said."""
    truncated: list[bool]
    prompts: list[Prompt] = []
    """Empty: a function of the recipe has evaluated prompts of its own."""
