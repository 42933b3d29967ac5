"""Language models that only give log-probs: a reference, a teacher, an average of the policy."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.megatron import head, model
from slipstream.backend.megatron.fusions import KernelSupport, head_implementation
from slipstream.backend.megatron.packed_model import LanguageModel
from slipstream.backend.megatron.weights import sharded_weights, take_over
from slipstream.bridge.model.spec import ModelSpec
from slipstream.configs.schema import ActorConfig


class FrozenModel:
    """A model that is not trained, in the policy's layout.

    On a GPU its weights wait in host memory between calls. ``average``: it follows the policy, and the
    waiting weights are in single precision.
    """

    def __init__(
        self,
        spec: ModelSpec,
        actor: ActorConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        average: bool = False,
    ) -> None:
        self._device, self._dtype = device, dtype
        # An average's weights must have the policy's names, hence the policy's layer spec.
        same = {"layer_spec": model.layer_spec_of(actor, dtype, spec.geometry), "lora": None}
        self._parts = model.build_model(spec, actor.model_copy(update=same), dtype, device)
        head.pass_on_hidden_states(self._parts)
        for part in self._parts:
            part.requires_grad_(False)
        self._model = LanguageModel(
            self._parts,
            device,
            vocab=spec.geometry.vocab,
            float32_logits=actor.fp32_lm_head,
            implementation=head_implementation(actor, KernelSupport.present()),
        )
        self._shards = [dict(part.named_parameters()) for part in self._parts]
        self._waiting = [
            {name: self._on_host(shard, torch.float32 if average else dtype) for name, shard in part.items()}
            for part in self._shards
        ]
        self._put(self._waiting)

    @property
    def parts(self) -> Sequence[torch.nn.Module]:
        """Parts of the model on this rank."""
        return self._parts

    def log_probs(self, microbatches: Sequence[MicroBatch], temperature: float) -> list[Tensor | None]:
        """Return log-probs as ``LanguageModel.log_probs`` does."""
        with self._on_device():
            return self._model.log_probs(microbatches, temperature)

    @torch.no_grad()
    def follow(self, policy: Sequence[Mapping[str, Tensor]], decay: float) -> None:
        """average <- decay * average + (1 - decay) * policy, of which ``policy`` has each part's shards."""
        for average, current in zip(self._waiting, policy, strict=True):
            for name, weight in average.items():
                weight.lerp_(current[name].to(weight), 1 - decay)

    def sharded_weights(self, prefix: str) -> dict[str, object]:
        """Return the part of a checkpoint for this model: the waiting weights."""
        return sharded_weights(self._parts, prefix)

    def take_over(self, loaded: Mapping[str, object], prefix: str) -> None:
        """Take over the weights that were loaded for ``sharded_weights``."""
        take_over(self._parts, loaded, prefix)

    def _on_host(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        waiting = shard.detach().to("cpu", dtype)
        return waiting.pin_memory() if self._device.type == "cuda" else waiting

    def _put(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Let the model's parameters refer to ``weights``."""
        for shards, values in zip(self._shards, weights, strict=True):
            for name, shard in shards.items():
                shard.data = values[name]

    @contextmanager
    def _on_device(self) -> Generator[None]:
        """Hold the weights on the device, in the dtype of computation."""
        self._put(
            [
                {
                    name: weight.to(self._device, self._dtype, non_blocking=True)
                    for name, weight in part.items()
                }
                for part in self._waiting
            ]
        )
        try:
            yield
        finally:
            self._put(self._waiting)
