"""What is compared: recipes' settings of the actor, and how the lag of a batch comes about.

Legend: eta is the bound ``rollout.max_head_offpolicyness``; step t starts from version t.
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from slipstream.configs.load import load_recipe
from slipstream.configs.schema import RunConfig

UNBOUNDED = -1
"""Stands for an eta without a bound."""
PACE = 2
"""Without a bound the generator makes this many batches in the time of one training step."""
ETAS = (0, 1, 2, 4, 8, 16, UNBOUNDED)

BATCH_GROUPS = 8
"""Prompts of a batch: half of the recipe's, for twice the steps in the same time."""

REFERENCE = "decoupled"
_BEHAVIOUR_ONLY = (
    "actor.use_decoupled_loss=false",
    "actor.recompute_logprobs=false",
    "actor.correction={}",
)
"""No proximal policy: the ratio is pi / mu."""
METHODS: dict[str, tuple[str, ...]] = {
    "naive": _BEHAVIOUR_ONLY,
    "decoupled": (),
    "unweighted": ("actor.use_decoupled_loss=false", "actor.correction={}"),
    "interpolated": ("actor.recompute_logprobs=false", "actor.interpolate_logprobs=true"),
    "decayed_clip": ("actor.objective={type: decayed_clip}",),
    "m2po": ("actor.objective={type: m2po}", *_BEHAVIOUR_ONLY),
    "dppo": ("actor.objective={type: dppo}", *_BEHAVIOUR_ONLY),
    "cispo": ("actor.objective={type: cispo}", *_BEHAVIOUR_ONLY),
    "negative": ("actor.correction.negative={delta: 1e-4}",),
    "gspo": ("actor.objective={type: gspo}", "actor.averaging=sequence"),
}
"""Name -> what it changes in the quickstart's recipe, which is the default itself: PPO, decoupled, weights
capped at 5."""

SAME_WHEN_FRESH = frozenset({"naive", "decoupled", "unweighted", "interpolated", "decayed_clip"})
"""At lag 0 mu is pi_old: these are one and the same loss then, and run once."""


@cache
def config_of(method: str, lr: float) -> RunConfig:
    """The quickstart's recipe with the settings of ``method``, read and checked as any recipe is."""
    return load_recipe(
        Path("quickstart"),
        [*METHODS[method], f"actor.optimizer.lr={lr}", f"rollout.batch_size={BATCH_GROUPS}"],
    )


def cells(methods: Iterable[str], etas: Iterable[int]) -> Iterator[tuple[str, int]]:
    """(method, eta) of every cell that has to run."""
    for eta, method in itertools.product(etas, methods):
        if runs_as(method, eta) == (method, eta):
            yield method, eta


def runs_as(method: str, eta: int) -> tuple[str, int]:
    """The cell whose runs stand for this one."""
    return (REFERENCE if eta == 0 and method in SAME_WHEN_FRESH else method), eta


def sampled_from(step: int, eta: int) -> int:
    """The version that samples the batch of training step ``step``, both from 0.

    Bounded: the generator is always ahead, as far as the bound lets it, so that every token is as old as it
    may be: lag 0, 1, 2, .. eta, eta, eta. Unbounded: it makes ``PACE`` batches per training step, each from
    the newest version when it is begun; the lag grows without end, by one in ``PACE / (PACE - 1)`` steps.
    """
    return step // PACE if eta == UNBOUNDED else max(0, step - eta)
