"""The adapter of a version on its way to the engines, without a model."""

import asyncio
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.publisher import Publisher
from slipstream.bridge.publish.report import PublishReport
from slipstream.bridge.shards.adapter import AdapterSpec, a_name, b_name
from slipstream.bridge.transport.adapter import AdapterTransport, packed_tensors
from tests.unit.test_bridge_peft import adapter


class Engine:
    """An engine that records what it is asked for, and fails at one step."""

    ranks = 1

    def __init__(self, name: str, log: list[tuple[str, str]], fails_at: str | None = None) -> None:
        self.name = self.address = name
        self._log, self._fails_at = log, fails_at
        self.adapter: tuple[int, Mapping[str, object], dict[str, Tensor]] | None = None

    def _note(self, step: str) -> None:
        self._log.append((self.name, step))
        if step == self._fails_at:
            raise ConnectionError(f"gone at {step}")

    async def respond(self) -> None:
        self._note("ask")

    async def pause(self, mode: str) -> None:
        assert mode == "abort", "running requests are bound to the adapter of before"
        self._note("pause")

    async def resume(self) -> None:
        self._note("resume")

    async def load_adapter(self, version: int, config: Mapping[str, object], tensors: bytes) -> None:
        self._note("load")
        bucket = pickle.loads(tensors)
        flat = bucket["flattened_tensor"]
        received = {
            each.name: flat[each.start_idx : each.end_idx].view(each.dtype).reshape(each.shape)
            for each in bucket["metadata"]
        }
        self.adapter = (version, config, received)

    async def serve_adapter(self, version: int) -> None:
        assert self.adapter is not None and self.adapter[0] == version
        self._note("serve")


def exported(of: AdapterSpec, fail: bool = False) -> Iterator[FlatBucket]:
    """Buckets in one and the same memory, as the export yields them."""
    memory = torch.empty(1 << 16)
    for layer, shapes in zip(of.modules, of.shapes, strict=True):
        names = [a_name(layer[0]), *map(b_name, layer)]
        sizes = [(of.rank, shapes[0][1]), *((rows, of.rank) for rows, _ in shapes)]
        flat = memory[: sum(rows * columns for rows, columns in sizes)]
        flat.copy_(torch.arange(len(flat)) + float(len(names)))
        yield FlatBucket(tuple(names), tuple(sizes), flat, last=layer is of.modules[-1])
        if fail:
            raise RuntimeError("a rank is gone")


def publish(engines: list[Engine], version: int = 8, fail: bool = False) -> PublishReport:
    of, timeouts = adapter(), Timeouts(transfer_s=60, answer_s=60)
    publisher = Publisher(AdapterTransport(of, Path("base")), interrupt="abort", timeouts=timeouts)
    return asyncio.run(publisher.publish(version, engines, exported(of, fail)))


def test_engines_load_the_whole_adapter_while_they_generate_and_serve_it_behind_a_pause():
    log: list[tuple[str, str]] = []
    engine = Engine("a", log)
    report = publish([engine])
    assert [step for _, step in log] == ["ask", "load", "pause", "serve", "resume"]
    assert report.updated == ["a"] and report.version == 8
    version, config, tensors = engine.adapter
    assert version == 8 and config["base_model_name_or_path"] == "base"
    assert len(tensors) == 2 * sum(map(len, adapter().modules))
    for layer in adapter().modules:
        start = float(1 + len(layer))
        assert tensors[a_name(layer[0])].flatten()[0] == start, "not what the memory held later"
        for module in layer:
            assert torch.equal(tensors[a_name(module)], tensors[a_name(layer[0])]), "modules share A"
    assert report.bytes_sent >= sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("step", ["ask", "load", "pause", "serve", "resume"])
def test_an_engine_that_fails_a_step_is_not_updated_and_the_others_are(step: str):
    log: list[tuple[str, str]] = []
    report = publish([Engine("a", log, fails_at=step), Engine("b", log)])
    assert report.updated == ["b"]
    assert f"gone at {step}" in report.failed["a"]
    assert [each for name, each in log if name == "a"][-1] == step, "it is not asked for anything more"


def test_an_adapter_that_cannot_be_gathered_reaches_no_engine():
    log: list[tuple[str, str]] = []
    with pytest.raises(RuntimeError, match="a rank is gone"):
        publish([Engine("a", log)], fail=True)
    assert log == [("a", "ask")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_packed_by_value(dtype: torch.dtype):
    tensors = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7, 3).to(dtype).T}
    bucket = pickle.loads(packed_tensors(tensors))
    assert not bucket["flattened_tensor"].is_shared(), "an engine on another node reads it"
    for each in bucket["metadata"]:
        part = bucket["flattened_tensor"][each.start_idx : each.end_idx].view(each.dtype).reshape(each.shape)
        assert torch.equal(part, tensors[each.name])
