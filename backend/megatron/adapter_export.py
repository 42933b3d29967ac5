"""The way of a trained adapter out of the ranks: its factors alone, as PEFT's tensors on the sender."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slipstream.backend.megatron.lora import adapter_of, factors
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.peft import write_peft
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.adapter import peft_config_of
from slipstream.bridge.shards.export import export
from slipstream.bridge.shards.factors import peft_tensors
from slipstream.bridge.shards.plan import make_plan
from slipstream.configs.schema import LoraConfig

BUCKET_BYTES = 2**28


class AdapterExport:
    """Exports the adapter of this rank's parts of a model, as often as it is asked to. Collective."""

    def __init__(
        self, parts: Sequence[GPTModel], spec: ModelSpec, layout: Layout, lora: LoraConfig, rank: int
    ) -> None:
        """``layout``: that of the ranks, with the local layer spec, of which adapted layers are."""
        self.adapter = adapter_of(spec, lora)
        self.parameters: Sequence[Mapping[str, Tensor]] = [factors(part) for part in parts]
        self._base = spec.path
        self._rank = rank
        itemsize = next(iter(self.parameters[0].values())).itemsize
        self._plan = make_plan(self.adapter.factors, layout, BUCKET_BYTES, itemsize)

    def buckets(self) -> Iterator[FlatBucket | None]:
        """Yield the factors as ``bridge.shards.export`` does."""
        return export(self._plan, self.parameters, self._rank)

    def write(self, folder: Path) -> None:
        """Write the adapter in PEFT's format. The sender writes."""
        tensors = peft_tensors(self.buckets(), self.adapter)
        if tensors:
            write_peft(tensors, peft_config_of(self.adapter, str(self._base)), folder)
