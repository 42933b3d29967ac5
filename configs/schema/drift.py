"""``actor.drift``: limits on how far the policy may leave the one that sampled its data."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.base import Section


class DriftConfig(Section):
    """Slows training while the policy at the start of a training step is too far from the policy that sampled
    its batch. Formulas: docs/objectives.md#limits-of-drift."""

    kl: float | None = Field(
        default=0.01,
        gt=0,
        description="Largest KL(mu, pi_old), in nats per token (`staleness/kl`); null: unlimited.",
    )
    ess: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Smallest effective sample size of the importance weights pi_old / mu, as a fraction of "
        "the tokens (`train/ess`); null: unlimited.",
    )
    slows: Literal["learning_rate", "admission"] = Field(
        default="learning_rate",
        description="Quantity that is reduced to hold the limits. `learning_rate`: the factor of the "
        "learning rate. `admission`: the number of groups that may be in flight, so that tokens become "
        "less stale while the learning rate stays.",
    )
    floor: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Smallest factor of the learning rate, or smallest fraction of the groups in flight. "
        "One batch may always be in flight.",
    )
