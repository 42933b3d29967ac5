"""The points of a rank at which a recipe's ``rollout.hooks`` come in. These classes are a recipe without any.

start     provider of the model
step      step_begins ──► log_probs_begin ──► targets ──► for each update: update_begins ──► loss_of
version   publication_begins ──► version_written
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective.losses import Tokens, Weigh
from slipstream.backend.objective.policy_loss import PolicyLoss
from slipstream.backend.trainer.prepared import PreparedMicroBatch, Scores, Targets
from slipstream.configs.schema import RunConfig
from slipstream.rollout.compat.hooks import adapter
from slipstream.rollout.engine.client import EngineAddress

if TYPE_CHECKING:  # Megatron can only be imported once the rank has joined its groups
    from slipstream.backend.megatron.model import ModelProvider
    from slipstream.backend.megatron.packed_model import LanguageModel
    from slipstream.backend.megatron.trained import Trained

ADAPTER = "slipstream.backend.trainer.slime.rank_hooks.make_rank_hooks"
"""Import path of what makes the hooks of a recipe that names any."""


class MicroBatchLoss:
    """The loss of one micro-batch: the recipe's. Used once, in the order of its methods."""

    replaces_loss = False
    """True if ``custom_total`` gives the whole loss: the recipe's own, its entropy bonus and its penalty."""

    def weighing(self, tokens: Tokens, share_M: Tensor) -> Weigh | None:
        """Return the function that weighs the losses of ``tokens``; None: the importance weight does."""
        return None

    def kept(self, loss: PolicyLoss) -> PolicyLoss:
        """Return the losses without those of tokens whose loss a hook has taken away."""
        return loss

    def total(self, loss: PolicyLoss, share_M: Tensor) -> Tensor:
        """Return the sum of token losses of the micro-batch, as Megatron divides it."""
        return (share_M * loss.loss_T).sum()

    def custom_total(self, policy: "LanguageModel", hidden_1TH: Tensor) -> Tensor:
        """Return the total that a hook finds from logits. Only if ``replaces_loss``."""
        raise AssertionError("no hook replaces the loss")

    def statistics(self) -> dict[str, Tensor]:
        """Return the sums of the hooks' metrics, and the loss if it is not the recipe's mean."""
        return {}


class RankHooks:
    """The hooks that a recipe names for ranks: none."""

    names_statistics = False
    """True if ranks may have different statistics, since hooks name some of them."""

    @property
    def provider(self) -> "ModelProvider | None":
        """Maker of the parts of the policy; None for Slipstream's own."""
        return None

    def step_begins(self, step: int, batch: TrainBatch, microbatches: Sequence[MicroBatch]) -> None:
        """Begin training step ``step``, counted from 0, on this rank's micro-batches of ``batch``."""

    def log_probs_begin(self, parts: Sequence[torch.nn.Module], role: str) -> None:
        """Called before the model of ``role`` (`policy`, `reference`, `teacher`) computes log-probs."""

    def targets(
        self, scores: Sequence[Scores], targets: Sequence[Targets | None]
    ) -> Sequence[Targets | None]:
        """Return the targets of the step's micro-batches as hooks have set or changed them."""
        return targets

    def update_begins(self, number: int, trained: "Trained", lr: float) -> None:
        """Called before optimizer update ``number`` of the step."""

    def loss_of(self, item: PreparedMicroBatch) -> MicroBatchLoss:
        """Return the loss of a micro-batch of this step."""
        return MicroBatchLoss()

    def publication_begins(self, engines: Sequence[EngineAddress]) -> None:
        """Begin to publish to ``engines``. Called on the sender alone."""

    def version_written(self, folder: Path) -> None:
        """Called when the files of a version are complete in ``folder``."""


def rank_hooks(config: RunConfig, device: torch.device) -> RankHooks:
    """Return the hooks of a recipe that run on this rank. Without a section ``rollout.hooks`` nothing is
    imported.

    Megatron's process groups must exist. Raises PluginError, ValueError and OSError, and what a hook raises.
    """
    if config.rollout.hooks is None:
        return RankHooks()
    return cast("RankHooks", cast("Any", adapter(ADAPTER))(config, device))
