"""Keeps measurements of training steps for the steps that follow.

metrics of a step ──► Feedback ──► factor of the learning rate, mismatch ──► next batch
                         │  └────► groups that may be in flight ──► admission
                         └───────► checkpoint ──► Feedback of a resumed run
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from slipstream.backend.batch.train_batch import EncodedBatch
from slipstream.configs.schema import RunConfig
from slipstream.rollout.control.admission import AdmissionPolicy
from slipstream.rollout.control.drift import DriftController, DriftLimits

MISMATCH = "mismatch/logprob_square_mean"
MEMORY = 0.8
"""Weight of the earlier steps in the average of the mismatch."""


@dataclass
class Feedback:
    """Averages over the steps of a run. The driver keeps it, and every checkpoint holds a copy."""

    mismatch: float | None = None
    """Mean of log(pi_old / mu)^2 over tokens of lag 0; None: not measured yet."""
    drift: DriftController | None = None
    """None: the recipe sets no limits."""
    scales_rate: bool = False
    """True if the drift is held by the learning rate."""

    @staticmethod
    def of(config: RunConfig, recorded: Mapping[str, Any] | None) -> "Feedback":
        """Return that of a recipe. ``recorded``: ``state`` in the checkpoint of a resumed run; None: none."""
        known = recorded or {}
        settings = config.actor.drift
        if settings is None:
            return Feedback(known.get("mismatch"))
        drift = DriftController(
            DriftLimits(settings.kl, settings.ess),
            settings.floor,
            config.rollout.max_head_offpolicyness,
            **known.get("drift", {}),
        )
        return Feedback(known.get("mismatch"), drift, settings.slows == "learning_rate")

    @property
    def rate_factor(self) -> float:
        """Factor of the learning rate of the next step."""
        return self.drift.rate_factor if self.drift is not None and self.scales_rate else 1.0

    def admission(self, policy: AdmissionPolicy) -> AdmissionPolicy:
        """Return ``policy``; where admission holds the drift, one that also denies what would make tokens
        staler than the limits of drift allow.
        """
        drift = self.drift
        if drift is None or self.scales_rate:
            return policy
        return lambda now: now.held < drift.batches_in_flight(now.bound + 1) * now.batch_size and policy(now)

    def prepared(self, batch: EncodedBatch) -> EncodedBatch:
        """Return the batch with what the steps before it decide about it."""
        return replace(batch, rate_factor=self.rate_factor, mismatch=self.mismatch)

    def observe(self, batch: EncodedBatch, metrics: Mapping[str, float]) -> None:
        """Learn from the step that has trained on ``batch``."""
        if (measured := metrics.get(MISMATCH)) is not None:
            known = self.mismatch
            self.mismatch = measured if known is None else MEMORY * known + (1 - MEMORY) * measured
        if self.drift is None or "staleness/kl" not in metrics:
            return
        lags = Counter[int]()
        for header in batch.headers:
            for version, tokens in header.trained_tokens.items():
                lags[batch.version - version if batch.lags is None else batch.lags[version]] += tokens
        self.drift.observe(
            metrics["train/lr"], batch.rate_factor, lags, metrics["staleness/kl"], metrics["train/ess"]
        )

    def state(self) -> dict[str, object]:
        """Return what a checkpoint holds: JSON."""
        drift = {} if self.drift is None else asdict(self.drift)
        return {
            "mismatch": self.mismatch,
            "drift": {name: drift[name] for name in DriftController.STATE if name in drift},
        }
