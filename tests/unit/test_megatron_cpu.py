"""What is patched for Megatron on a machine without a GPU leaves the rest of torch as it is."""

import pytest
import torch

from slipstream.backend.megatron.parallel import RankSpec
from tests.ranks import run_ranks


def devices(rank: RankSpec) -> list[str]:
    from slipstream.backend.megatron import cpu

    cpu.install()
    with torch.device("meta"):
        made = [torch.empty(1), torch.zeros(1), torch.ones(1), torch.tensor([1.0])]
    return [tensor.device.type for tensor in [*made, torch.zeros(1, device="cuda")]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched where there is a GPU")
def test_a_default_device_still_holds_for_patched_constructors():
    assert run_ranks(1, devices) == [["meta"] * 4 + ["cpu"]]
