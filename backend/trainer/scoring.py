"""Scores of a batch by the policy and the models besides it, before it is trained on."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.megatron.frozen import FrozenModel
from slipstream.backend.megatron.packed_model import LanguageModel
from slipstream.backend.trainer.critic import Critic
from slipstream.backend.trainer.prepared import Scores
from slipstream.bridge.families import model_spec
from slipstream.configs.schema import ActorConfig, AverageReference, CriticConfig, ModelConfig
from slipstream.rollout.system import plugins


class Scorers:
    """The models that the recipe's objective needs besides the policy. All have the policy's layout."""

    def __init__(
        self,
        actor: ActorConfig,
        critic: CriticConfig | None,
        model: ModelConfig,
        device: torch.device,
        run_steps: int,
        before: Callable[[Sequence[torch.nn.Module], str], object] | None = None,
    ) -> None:
        """``before``: called with the parts of a model and its role, `policy`, `reference` or `teacher`,
        before it computes log-probs.
        """
        self._before = before
        dtype, policy_path = getattr(torch, model.dtype), model.path
        reference, families = actor.kl and actor.kl.reference, plugins.resolved(model.families)
        self._decay = reference.decay if isinstance(reference, AverageReference) else None
        self._reference = self._teacher = self.critic = None
        if reference is not None:
            path = policy_path if isinstance(reference, AverageReference) else reference.path or policy_path
            self._reference = FrozenModel(
                model_spec(path, families), actor, dtype, device, average=self._decay is not None
            )
        if actor.teacher_model is not None:
            self._teacher = FrozenModel(model_spec(actor.teacher_model.path, families), actor, dtype, device)
        if critic is not None:
            spec = model_spec(critic.path or policy_path, families)
            self.critic = Critic(critic, actor, spec, dtype, device, run_steps=run_steps)

    @property
    def average(self) -> FrozenModel | None:
        """The reference that follows the policy, which is part of the trainer's state."""
        return self._reference if self._decay is not None else None

    def score(
        self,
        policy: LanguageModel,
        minibatches: Sequence[Sequence[MicroBatch]],
        first: int,
        temperature: float,
    ) -> list[Scores]:
        """Return the scores of each micro-batch, which are empty except on the last pipeline stage.

        ``first``: the first mini-batch with proximal log-probs (``first_recomputed``). ``temperature``: that
        at which completions are sampled.
        """
        microbatches = list(chain.from_iterable(minibatches))
        nothing: list[Tensor | None] = [None] * len(microbatches)

        def log_probs(model: FrozenModel | None, role: str) -> list[Tensor | None]:
            if model is None:
                return nothing
            if self._before is not None:
                self._before(model.parts, role)
            return model.log_probs(microbatches, temperature)

        proximal = self._proximal(policy, minibatches, first, temperature)
        values = self.critic.values(microbatches) if self.critic is not None else nothing
        by_model = (
            proximal,
            log_probs(self._reference, "reference"),
            log_probs(self._teacher, "teacher"),
            values,
        )
        return [Scores(*scores) for scores in zip(*by_model, strict=True)]

    def _proximal(
        self,
        policy: LanguageModel,
        minibatches: Sequence[Sequence[MicroBatch]],
        first: int,
        temperature: float,
    ) -> list[Tensor | None]:
        """Return the proximal log-probs of each micro-batch; None where none are computed beforehand."""
        given: list[Tensor | None] = [None] * sum(map(len, minibatches[:first]))
        recomputed = list(chain.from_iterable(minibatches[first:]))
        if not recomputed:
            return given
        if self._before is not None:
            self._before(policy.parts, "policy")
        with policy.routes_kept():
            return given + policy.log_probs(recomputed, temperature)

    def follow(self, policy: Sequence[Mapping[str, Tensor]]) -> None:
        """Let the average, if there is one, take in the policy's shards after a step."""
        if self._reference is not None and self._decay is not None:
            self._reference.follow(policy, self._decay)
