"""A packed micro-batch takes few operators, and the host waits for the device nowhere in it."""

import pytest
import torch

from tests.operators import MODELS, ModelCounts, counted, measured

DENSE = [name for name in MODELS if name != "mixture of experts"]
MOST_OPERATORS = {
    "grouped-query attention": 60,
    "grouped-query attention, YaRN": 50,
    "latent attention": 145,
    "latent attention, YaRN": 145,
    "mixture of experts": 130,
}
"""Operators of a layer's forward pass over 64 segments, whose lengths are of five classes. Without the
rotation by position Megatron-Core 0.19 has more than 1,400."""
MOST_WAITS_OF_EXPERTS = 9
"""Waits of a layer with experts in plain PyTorch. The sizes of the exchange between ranks and of the experts'
shares are data, so one is needed; Transformer Engine's kernels save the others."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory) -> dict[str, ModelCounts]:
    return measured(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("model", DENSE)
def test_the_host_waits_nowhere_in_a_micro_batch(counts, model: str):
    """Forward pass, LM head, loss, statistics and backward pass."""
    assert not counts[model].microbatch.waits
    assert not counts[model].layer.waits


def test_layers_with_experts_wait_for_the_sizes_of_their_shares_alone(counts):
    waits = counts["mixture of experts"].layer.waits
    assert 0 < waits.total() <= MOST_WAITS_OF_EXPERTS
    for place in waits:
        assert any(file in place for file in ("moe_utils.py", "experts.py", "token_dispatcher.py")), place


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_takes_few_operators_however_many_segments_there_are(counts, model: str):
    assert 30 < counts[model].layer.operators.total() <= MOST_OPERATORS[model]


@pytest.mark.parametrize("model", MODELS)
def test_a_micro_batch_travels_in_one_copy(counts, model: str):
    """The advantages of a step are the third copy of its two micro-batches: they are known later."""
    assert counts[model].copies == 3


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "cuda": lambda x: x.cuda(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked select": lambda x: x.masked_select(x > 0),
    "several values by a mask": lambda x: x.index_put_((x > 0,), torch.ones(2)),
    "tensor on the device": lambda x: torch.tensor(1, device=x.device),
    "unique": lambda x: x.unique(),
    "repetitions": lambda x: x.repeat_interleave(torch.tensor([1, 2, 3])),
    "slice by a tensor": lambda x: x[: torch.tensor(2)],
}
NO_WAITS = {
    "one value by a mask": lambda x: x.masked_fill_(x > 0, 1.0),
    "assignment by a mask": lambda x: x.__setitem__(x > 0, 1.0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "places": lambda x: x[torch.tensor([0, 2])],
    "tensor on the host": lambda x: torch.tensor(1),
}


@pytest.mark.parametrize("name", WAITS)
def test_each_kind_of_wait_is_seen(name: str):
    with counted() as counts:
        WAITS[name](torch.tensor([0.0, 1.0, 2.0]))
    assert counts.waits.total() >= 1


@pytest.mark.parametrize("name", NO_WAITS)
def test_what_never_waits_is_not_counted(name: str):
    with counted() as counts:
        NO_WAITS[name](torch.tensor([0.0, 1.0, 2.0]))
    assert not counts.waits
