"""Tracing a loader: each element that it copies is noted, and the parameters stay as they are.

The oracle runs the same loader on tensors of consecutive numbers.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from slipstream.bridge.engine.loader_trace import EngineTable, Untraceable, Wanted, trace

HF = {
    "q": (4, 6),
    "k": (2, 6),
    "v": (2, 6),
    "down": (6, 8),
    "words": (5, 6),
    "norm": (6,),
    "e.0.up": (3, 6),
    "e.1.up": (3, 6),
    "kernel": (4, 1, 3),
    "gate_up": (6, 5),
}


class Model(nn.Module):
    """Loads as SGLang's models do: fused, cut by rank, padded, transposed, concatenated, in threads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(8, 6))
        self.down = nn.Parameter(torch.randn(6, 4))
        self.words = nn.Parameter(torch.cat([torch.randn(5, 6), torch.zeros(3, 6)]))
        self.norm = nn.Parameter(torch.randn(6))
        self.experts = nn.Parameter(torch.randn(2, 6, 3))
        self.fused = nn.Parameter(torch.randn(6, 8))
        self.kernel = nn.Parameter(torch.randn(4, 3))
        self.gate_and_up = nn.Parameter(torch.randn(6, 5))

    def load_weights(self, weights):
        tensors = dict(weights)
        with ThreadPoolExecutor(3) as threads:
            for name, tensor in tensors.items():
                threads.submit(self._load, name, tensor).result()
        self.fused.data.copy_(torch.cat([tensors["k"], tensors["q"], tensors["v"]], dim=0).t())

    def _load(self, name, tensor):
        match name.split("."):
            case ["q" | "k" | "v"]:
                first, rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}[name]
                self.qkv.data.narrow(0, first, rows).copy_(tensor)
            case ["down"]:
                self.down.data.copy_(tensor.chunk(2, dim=1)[1].contiguous())
            case ["words"]:
                self.words.data[:5] = tensor[:]
                self.words.data[5:].fill_(0)
            case ["norm"]:
                self.norm.data.copy_(tensor.to(self.norm.dtype))
            case ["e", number, _]:
                self.experts.data[int(number)].copy_(tensor.transpose(0, 1))
            case ["gate_up"]:
                self.gate_and_up.data[:3].copy_(tensor[::2])
                self.gate_and_up.data[3:].copy_(tensor[1::2])
            case ["kernel"]:
                self.kernel.data.copy_(tensor.squeeze(1))

    def post_load_weights(self):
        raise AssertionError("there is nothing to derive anything from")


def traced(model: nn.Module) -> EngineTable:
    return trace(model, [Wanted(name, shape, torch.float32) for name, shape in HF.items()])


def test_the_regions_of_a_trace_say_what_the_loader_does():
    torch.manual_seed(0)
    model, loaded = Model(), Model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    table = traced(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), "a trace changes nothing"

    numbers = {
        name: 100 * index + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        for index, (name, shape) in enumerate(HF.items(), start=1)
    }
    with torch.no_grad():
        loaded.load_weights(numbers.items())
        for region in table.regions:
            values = numbers[region.hf][
                tuple(
                    slice(start, start + n * step, step)
                    for start, n, step in zip(region.start, region.size, region.step, strict=True)
                )
            ]
            target = model.get_parameter(region.tensor).detach()
            torch.as_strided(target, region.size, region.stride, region.offset).copy_(values)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    assert table.filled == {"words": 30}


def test_parameters_that_nothing_fills_are_named():
    model = Model()
    model.extra = nn.Parameter(torch.ones(3))
    assert traced(model).filled == {"words": 30, "extra": 0}


def test_a_model_without_memory_has_the_same_table():
    model = Model()
    assert traced(model.to("meta")) == traced(Model())


def loader(load):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 6))

        def load_weights(self, weights):
            load(self, dict(weights))

    return Other()


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda m, w: m.weight.data.copy_(w["q"] * 2), "aten::mul on q"),
        (lambda m, w: m.weight.data.copy_(w["q"].to(torch.bfloat16)), "q is converted to torch.bfloat16"),
        (lambda m, w: m.weight.data.copy_(w["norm"]), "norm: .* is broadcast into"),
        (lambda m, w: torch.zeros(4, 6).copy_(w["q"]), "q is copied into a tensor that is no parameter"),
        (lambda m, w: m.weight.data.copy_(w["q"][::2].repeat(2, 1)), "on q"),
        (
            lambda m, w: torch.cat([w["k"], torch.zeros(2, 6)]),
            "k is concatenated with a tensor that is not published",
        ),
        (lambda m, w: m.weight.data[0, :4].copy_(w["q"].diagonal()), "is no rectangle"),
        (
            lambda m, w: m.weight.data.copy_(torch.cat([w["q"], w["q"]])[::2]),
            "every other element of a concatenation",
        ),
        (lambda m, w: w["q"][:2].zero_(), "q is set to zero in part, or after it was copied"),
        (lambda m, w: m.weight.data.copy_(w["q"]) is w["q"].zero_(), "q is set to zero in part, or after"),
        (lambda m, w: torch.cat([w["k"], w["v"].zero_()]), "v is set to zero and concatenated"),
    ],
)
def test_a_loader_that_does_more_than_moving_elements_is_refused_by_name(load, reason):
    with pytest.raises(Untraceable, match=reason):
        traced(loader(load))


def test_a_parameter_that_the_loader_sets_to_zero_is_filled_with_zeros():
    model = loader(lambda m, w: m.weight.data[:].copy_(w["q"].zero_()))
    model.weight.data.fill_(1)
    table = traced(model)
    assert not table.regions and not table.filled
    assert not model.weight.any()


def test_a_parameter_of_a_wider_type_is_filled():
    model = loader(lambda m, w: m.weight.data.copy_(w["q"]))
    [region] = trace(model, [Wanted("q", (4, 6), torch.bfloat16)]).regions
    assert (region.tensor, region.size) == ("weight", (4, 6))


def test_a_parameter_of_a_narrower_type_is_refused():
    model = loader(lambda m, w: m.weight.data.copy_(w["q"]))
    model.weight.data = model.weight.data.bfloat16()
    with pytest.raises(
        Untraceable, match=r"q is torch.float32, but the engine holds weight as torch.bfloat16"
    ):
        traced(model)
