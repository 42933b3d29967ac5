"""Attention over prefix trees as a compiled kernel against a dense mask of all pairs."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.backend.megatron import tree_attention
from slipstream.backend.megatron.tree_attention import BLOCK, block_mask
from tests.unit.test_tree_attention import dense, forest, tree_of

pytestmark = pytest.mark.gpu(1, "triton")


@pytest.mark.parametrize(("window", "sunk"), [(None, False), (200, True)])
def test_the_compiled_kernel_gives_what_a_dense_mask_gives(window: int | None, sunk: bool):
    device = torch.device("cuda")
    end, position, _ = tree_of(forest(0, 40, longest=400))
    mask = block_mask(end.to(device), position.to(device), window)
    assert mask.shape[-1] // BLOCK > 8
    rng = torch.Generator().manual_seed(0)
    shapes = ((16, 128), (4, 128), (4, 128))
    parts = [torch.randn(len(end), *shape, generator=rng).to(device, torch.bfloat16) for shape in shapes]
    sinks = torch.randn(16, generator=rng).to(device) if sunk else None
    grad = torch.randn(len(end), 16 * 128, generator=rng).to(device, torch.bfloat16)
    hidden = ~dense(end, position, window).to(device)
    found = []
    for side in ("compiled", "dense"):
        query, key, value = leaves = [part.clone().requires_grad_() for part in parts]
        if side == "compiled":
            output = tree_attention.attend(query, key, value, mask, scale=0.1, sinks=sinks)
        else:
            key, value = (part.float().repeat_interleave(4, 1) for part in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query.float(), key) * 0.1
            scores = F.pad(scores.masked_fill(hidden, -torch.inf), (0, 1), value=-torch.inf)
            if sinks is not None:
                scores[:, :, -1] = sinks[:, None]
            output = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], value).flatten(1)
        output.backward(grad.to(output.dtype))
        found.append([output.detach().float(), *(leaf.grad.float() for leaf in leaves)])
    for actual, expected in zip(*found, strict=True):
        assert (actual - expected).norm() < 1e-2 * expected.norm()
