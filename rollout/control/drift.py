"""Holds the drift of the policy within limits by its learning rate, or by the staleness of its data. Pure.

The drift of a step is how far pi_old, which the step starts from, is from mu, which has sampled its batch:
KL(mu, pi_old) grows with the square of the way between the two, and so does 1 - ESS. The way of a token is
the sum of the learning rates of the steps since it was sampled. So

    strain = sqrt(max(KL / limit, (1 - ESS) / (1 - limit)))      measured; 1 is at the limit
    strain per way                                               estimated: an average over steps
    way per step <= 1 / (strain per way * mean lag)              then the next batches are at the limit

The estimate is of a property of the policy and its task, and changes slowly. A controller that reacted to the
strain alone would answer steps that are ``lag`` steps old, and would swing with that period.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor, sqrt
from typing import ClassVar

MEMORY = 0.8
"""Weight of the earlier steps in the estimate. One batch is noisy; this is mostly the last five."""

ROUNDING = 1e-6
"""A lag that differs from a whole number by less than this is that number."""


@dataclass(frozen=True)
class DriftLimits:
    """Limits of the drift; None: unlimited."""

    kl: float | None
    """Largest KL(mu, pi_old) in nats per token."""
    ess: float | None
    """Smallest effective sample size over the number of tokens."""

    def strain(self, kl: float, ess: float) -> float:
        """Return how strained the tighter limit is: 1 at the limit, twice as much at twice the way."""
        squares = [0.0]
        if self.kl is not None:
            squares.append(kl / self.kl)
        if self.ess is not None:
            squares.append((1 - ess) / (1 - self.ess))
        return sqrt(max(squares))


@dataclass
class DriftController:
    """Estimates how fast the policy drifts, and says how much slower it must.

    controller = DriftController(DriftLimits(kl=0.01, ess=None), floor=0.05, window=4)
    factor = controller.rate_factor
    step(rate * factor)
    controller.observe(rate * factor, factor, lags={0: 256, 1: 256}, kl=0.002, ess=0.99)
    """

    STATE: ClassVar = ("strain_per_way", "rate", "lag", "ways")
    """Fields that change."""

    limits: DriftLimits
    floor: float
    """Smallest factor."""
    window: int
    """Largest lag of a token, in versions."""
    strain_per_way: float = 0.0
    """Estimate. 0: nothing was measured."""
    rate: float = 0.0
    """Learning rate of the last step without a factor."""
    lag: float = 0.0
    """Mean lag of the last batch, in versions."""
    ways: list[float] = field(default_factory=list[float])
    """Learning rates of the last ``window`` steps, the newest last."""

    def observe(self, rate: float, factor: float, lags: Mapping[int, int], kl: float, ess: float) -> None:
        """Learn from one step.

        ``rate``: learning rate that it had, with ``factor``. ``lags``: number of its tokens by lag.
        """
        tokens = sum(lags.values())
        if tokens:
            way = sum(n * sum(self.ways[-lag:]) for lag, n in lags.items() if lag > 0) / tokens
            self.lag = sum(n * lag for lag, n in lags.items()) / tokens
            if way > 0:
                measured = self.limits.strain(kl, ess) / way
                memory = MEMORY if self.strain_per_way else 0.0
                self.strain_per_way = memory * self.strain_per_way + (1 - memory) * measured
        self.rate = rate / factor
        self.ways = [*self.ways, rate][-self.window :] if self.window else []

    @property
    def largest_way(self) -> float | None:
        """Sum of learning rates within the lag that is at the limit; None: nothing was measured."""
        return 1 / self.strain_per_way if self.strain_per_way else None

    @property
    def rate_factor(self) -> float:
        """Factor of the learning rate that holds the limits at the present lag."""
        if self.largest_way is None or not self.lag or not self.rate:
            return 1.0
        return min(1.0, max(self.floor, self.largest_way / (self.lag * self.rate)))

    def batches_in_flight(self, most: int) -> int:
        """Return how many batches of groups may be in flight to hold the limits at the full learning rate.

        ``most``: number without limits, one more than the bound on the lag. At least 1 is in flight.
        """
        if self.largest_way is None or not self.rate:
            return most
        largest_lag = max(self.largest_way / self.rate, self.floor * most)
        return min(most, 1 + floor(largest_lag + ROUNDING))
