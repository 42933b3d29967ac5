"""Methods that the study compares, as settings of the actor, and the lag of each batch.

Legend: eta is the bound ``rollout.max_head_offpolicyness``; step t starts from version t.
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from slipstream.configs.load import load_recipe
from slipstream.configs.schema import RunConfig

UNBOUNDED = -1
"""Value of eta for runs without a bound."""
PACE = 2
"""Number of batches that an unbounded generator makes during one training step."""
ETAS = (0, 1, 2, 4, 8, 16, UNBOUNDED)

BATCH_GROUPS = 8
"""Prompts of a batch: half as many as in the recipe, for twice the steps in the same time."""

REFERENCE = "decoupled"
_BEHAVIOUR_ONLY = (
    "actor.use_decoupled_loss=false",
    "actor.recompute_logprobs=false",
    "actor.correction={}",
)
"""Settings without a proximal policy: the ratio is pi / mu."""
METHODS: dict[str, tuple[str, ...]] = {
    "naive": _BEHAVIOUR_ONLY,
    "decoupled": (),
    "unweighted": ("actor.use_decoupled_loss=false", "actor.correction={}"),
    "interpolated": ("actor.recompute_logprobs=false", "actor.interpolate_logprobs=true"),
    "decayed_clip": ("actor.objective={type: decayed_clip}",),
    "m2po": ("actor.objective={type: m2po}", *_BEHAVIOUR_ONLY),
    "dppo": ("actor.objective={type: dppo}", *_BEHAVIOUR_ONLY),
    "cispo": ("actor.objective={type: cispo}", *_BEHAVIOUR_ONLY),
    "negative": ("actor.correction.negative={delta: 1e-4, errors: null}",),
    "negative_relative": ("actor.correction.negative={delta: 1e-4}",),
    "topr": ("actor.objective={type: topr}", *_BEHAVIOUR_ONLY),
    "asymmetric": (
        "actor.objective={type: aipo}",
        "actor.advantage=[{type: reward, shift: 0.3}]",
        *_BEHAVIOUR_ONLY,
    ),
    "drift": ("actor.drift={kl: 0.01}",),
    "drift_admission": ("actor.drift={kl: 0.01, slows: admission}",),
    "positives": (),
}
"""Overrides of the quickstart's recipe by method. The recipe is decoupled PPO with weights capped at 5."""

POSITIVES = "positives"
"""A control of the study, which no recipe has: negative advantages are 0, and their tokens count in means."""

SAME_WHEN_FRESH = frozenset(
    {"naive", "decoupled", "unweighted", "interpolated", "decayed_clip", "drift", "drift_admission"}
)
"""Methods with the same loss at lag 0, where mu is pi_old. They share one run."""


@cache
def config_of(method: str, lr: float) -> RunConfig:
    """Return the quickstart's recipe with the settings of ``method``, checked like a synchronous recipe.

    The study ages data itself. For stale data ``unweighted`` is refused, because nothing bounds pi / mu.
    """
    return load_recipe(
        Path("quickstart"),
        [
            *METHODS[method],
            f"actor.optimizer.lr={lr}",
            f"rollout.batch_size={BATCH_GROUPS}",
            "rollout.max_head_offpolicyness=0",
        ],
    )


def cells(methods: Iterable[str], etas: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Yield every cell (method, eta) that has runs of its own."""
    for eta, method in itertools.product(etas, methods):
        if runs_as(method, eta) == (method, eta):
            yield method, eta


def runs_as(method: str, eta: int) -> tuple[str, int]:
    """Return the cell whose runs this cell shares."""
    return (REFERENCE if eta == 0 and method in SAME_WHEN_FRESH else method), eta


def sampled_from(step: int, eta: int) -> int:
    """Return the version that samples the batch of training step ``step``. Both count from 0.

    With a bound, the generator is always as far ahead as the bound permits, so that every token is as old as
    it may be: lag 0, 1, 2, .. eta, eta, eta. Without a bound, it makes ``PACE`` batches per training step,
    each from the newest version at its start; the lag grows by one every ``PACE / (PACE - 1)`` steps.
    """
    return step // PACE if eta == UNBOUNDED else max(0, step - eta)
