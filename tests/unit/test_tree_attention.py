"""Attention over prefix trees against causal attention in float64 within each trajectory alone."""

from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import flex_attention as flex

from slipstream.backend.batch.context_parallel import share_of
from slipstream.backend.batch.micro_batch import assemble
from slipstream.backend.batch.prefixes import taken, tree_order
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron import device_batch, local_layers, tree_attention
from slipstream.backend.megatron.device_batch import Pack, on_device
from slipstream.backend.megatron.local_layers import PackedAttention
from slipstream.backend.megatron.tree_attention import BLOCK, block_mask, padded_length, sees, subtree_ends
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

KEYS, VALUES = 8, 6
"""Dimensions of a head."""


def forest(seed: int, leaves: int, *, longest: int = 40) -> list[np.ndarray]:
    """Token ids of trajectories as packs have them: branches of branches, equal ones, prefixes of others."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 3, int(rng.integers(1, longest)))]
    for _ in range(leaves - 1):
        stem = texts[int(rng.integers(len(texts)))]
        own = rng.integers(0, 1000, int(rng.integers(0, longest // 2)))
        text = np.concatenate([stem[: int(rng.integers(0, len(stem) + 1))], own])
        texts.append(text if len(text) else stem)
    return [texts[place] for place in tree_order(texts)]


def packed(texts: list[np.ndarray]) -> Pack:
    """The pack of these trajectories, of which each takes what it can from the one before it."""
    parts = [
        Trajectory(
            text,
            np.zeros(len(text), np.bool_),
            np.zeros(len(text), np.float32),
            np.full(len(text), UNSAMPLED, np.int32),
            Finish.STOP,
        )
        for text in texts
    ]
    batch = TrainBatch(0, tuple(parts), np.arange(len(parts)))
    micro = assemble(batch, list(range(len(parts))), taken_N=taken(texts))
    return on_device(micro, share_of(micro, 1, 0), torch.device("cpu"), unpacks=True).pack


def tree_of(texts: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Ends and positions of the tokens of a pack, and for each trajectory the places of all its tokens."""
    taken_N, paths, position, start = taken(texts), [[]], [], 0
    for text, take in zip(texts, taken_N.tolist(), strict=True):
        own = len(text) - take
        paths.append([*paths[-1][:take], *range(start, start + own)])
        position += range(take, len(text))
        start += own
    cu_seqlens = np.cumsum([0, *([len(text) for text in texts] - taken_N)])
    return torch.tensor(subtree_ends(cu_seqlens, taken_N)), torch.tensor(position), paths[1:]


def seen_pairs(paths: list[list[int]], tokens: int, window: int | None) -> torch.Tensor:
    """What each token attends to, bool [T, T], by the trajectories alone."""
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for path in paths:
        for depth, place in enumerate(path):
            seen[place, path[0 if window is None else max(0, depth + 1 - window) : depth + 1]] = True
    return seen


def dense(end: torch.Tensor, position: torch.Tensor, window: int | None) -> torch.Tensor:
    place, nothing = torch.arange(len(end)), torch.zeros(())
    return sees(end, position, window)(nothing, nothing, place[:, None], place)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("seed", range(8))
def test_a_token_sees_its_own_trajectory_up_to_itself(seed: int, window: int | None):
    end, position, paths = tree_of(forest(seed, 1 + 4 * seed))
    assert torch.equal(dense(end, position, window), seen_pairs(paths, len(end), window))


def visited(mask: flex.BlockMask, counts: str, places: str) -> torch.Tensor:
    """Blocks of pairs that a kernel visits by one of the tables of a mask, bool [rows, columns]."""
    count_R, place_RC = getattr(mask, counts)[0, 0], getattr(mask, places)[0, 0]
    found = torch.zeros(place_RC.shape, dtype=torch.bool)
    for row, (count, place_C) in enumerate(zip(count_R, place_RC, strict=True)):
        found[row, place_C[:count].long()] = True
    return found


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("seed", range(6))
def test_every_pair_that_is_seen_is_in_a_block_that_kernels_visit(seed: int, window: int | None):
    end, position, paths = tree_of(forest(seed, 12))
    block, tokens = 4, len(end)
    mask = block_mask(end, position, window, block)
    blocks = mask.shape[-1] // block
    pairs = torch.zeros(blocks * block, blocks * block, dtype=torch.bool)
    pairs[:tokens, :tokens] = seen_pairs(paths, tokens, window)
    pairs |= torch.eye(blocks * block, dtype=torch.bool)  # padding sees itself alone
    pairs = pairs.view(blocks, block, blocks, block).transpose(1, 2)
    some = visited(mask, "kv_num_blocks", "kv_indices")
    whole = visited(mask, "full_kv_num_blocks", "full_kv_indices")
    assert not (some & whole).any() and torch.equal(whole, pairs.all(-1).all(-1))
    if window is None:
        assert torch.equal(some | whole, pairs.any(-1).any(-1))
    else:
        assert not (pairs.any(-1).any(-1) & ~(some | whole)).any()
    assert torch.equal(visited(mask, "q_num_blocks", "q_indices"), some.T)
    assert torch.equal(visited(mask, "full_q_num_blocks", "full_q_indices"), whole.T)


def test_small_blocks_visit_little_more_than_the_pairs_of_the_tree():
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 1000, 200)
    texts = [np.concatenate([stem, rng.integers(0, 1000, n)]) for n in rng.integers(0, 60, 15)]
    texts = [texts[place] for place in tree_order(texts)]
    end, position, paths = tree_of(texts)
    pairs = int(seen_pairs(paths, len(end), None).sum())
    mask = block_mask(end, position, None, 4)
    count = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert pairs < 0.4 * sum(len(path) ** 2 / 2 for path in paths)
    assert pairs <= count * 16 < 1.1 * pairs


def heads_of(rng: torch.Generator, tokens: int, heads: int, groups: int) -> list[torch.Tensor]:
    shapes = ((heads, KEYS), (groups, KEYS), (groups, VALUES))
    return [torch.randn(tokens, *shape, generator=rng, dtype=torch.float64) for shape in shapes]


def alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    paths: list[list[int]],
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention within each trajectory, [T, heads * v]; all that share a token have the same result there."""
    each = query.shape[1] // key.shape[1]
    found: dict[int, torch.Tensor] = {}
    for path in paths:
        for depth, place in enumerate(path):
            keys = path[0 if window is None else max(0, depth + 1 - window) : depth + 1]
            scores = torch.einsum("hd,khd->hk", query[place], key[keys].repeat_interleave(each, 1)) * 0.3
            extra = scores.new_empty(len(scores), 0) if sinks is None else sinks[:, None]
            share = torch.cat([scores, extra], 1).softmax(-1)[:, : len(keys)]
            found[place] = torch.einsum("hk,khd->hd", share, value[keys].repeat_interleave(each, 1))
    return torch.stack([found[place] for place in range(len(query))]).flatten(1)


def layer(heads: int, groups: int, window: int | None, sinks: torch.Tensor | None) -> PackedAttention:
    """Packed attention without a GPU, by dense masks."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * KEYS,
        num_attention_heads=heads,
        num_query_groups=groups,
        window_size=None if window is None else (window - 1, 0),
    )
    made = PackedAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.3)
    made.softmax_offset = sinks
    return made


@pytest.fixture
def eager():
    """FlexAttention without a compiler, which on CPUs computes gradients too, but is not allowed to."""
    with (
        patch.object(tree_attention, "_compiled", lambda: flex.flex_attention),
        patch.object(flex, "_validate_device", lambda *tensors: None),
    ):
        yield


@pytest.mark.parametrize(
    ("heads", "groups", "window", "sunk"),
    [(2, 2, None, False), (4, 2, None, True), (4, 1, 5, False), (2, 2, 5, True)],
)
def test_flex_attention_gives_what_trajectories_give_alone(eager, heads, groups, window, sunk):
    texts = forest(heads + groups, 9, longest=16)
    end, position, paths = tree_of(texts)
    rng = torch.Generator().manual_seed(0)
    parts = heads_of(rng, len(end), heads, groups)
    if sunk:
        parts.append(torch.randn(heads, generator=rng, dtype=torch.float64))
    grad = torch.randn(len(end), heads * VALUES, generator=rng, dtype=torch.float64)
    mask = block_mask(end, position, window)
    found = []
    for side in ("flex", "dense", "alone"):
        query, key, value, *sinks = leaves = [part.clone().requires_grad_() for part in parts]
        sink = sinks[0] if sinks else None
        if side == "flex":
            output = tree_attention.attend(query, key, value, mask, scale=0.3, sinks=sink)
        elif side == "dense":
            output = layer(heads, groups, window, sink)(
                query, key, value, None, packed_seq_params=packed(texts)
            )
        else:
            output = alone(query, key, value, paths, window, sink)
        output.backward(grad)
        found.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for actual in found[:2]:
        for each, expected in zip(actual, found[2], strict=True):
            torch.testing.assert_close(each, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("window", "sunk"), [(3, False), (16, True), (40, False), (90, True)])
def test_long_trajectories_attend_to_their_window_in_chunks(window: int, sunk: bool):
    rng = torch.Generator().manual_seed(0)
    lengths = (1, 33, 64, 200, 129)
    ends = np.cumsum([0, *lengths])
    paths = [list(range(start, end)) for start, end in pairwise(ends.tolist())]
    parts = heads_of(rng, int(ends[-1]), 2, 1)
    sink = torch.randn(2, generator=rng, dtype=torch.float64) if sunk else None
    masks: list[int] = []

    def attended(*args: torch.Tensor, attn_mask: torch.Tensor | None, **options: object) -> torch.Tensor:
        masks.append(0 if attn_mask is None else attn_mask.numel())
        return sdpa(*args, attn_mask=attn_mask, **options)

    sdpa = F.scaled_dot_product_attention
    found = []
    for side in ("chunks", "alone"):
        query, key, value = leaves = [part.clone().requires_grad_() for part in parts]
        if side == "chunks":
            with (
                patch.object(local_layers, "WINDOW_CHUNK", 16),
                patch.object(F, "scaled_dot_product_attention", attended),
            ):
                pack = device_batch.pack(ends, torch.device("cpu"))
                output = layer(2, 1, window, sink)(query, key, value, None, packed_seq_params=pack)
        else:
            output = alone(query, key, value, paths, window, sink)
        output.square().sum().backward()
        found.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    assert 0 < max(masks) <= (2 * max(window, 16) + 1) ** 2, "not the square of a trajectory's length"


def test_packs_of_one_padded_length_share_a_kernel():
    counter = torch._dynamo.testing.CompileCounter()
    compiled = partial(tree_attention._compiled, counter)
    with patch.object(tree_attention, "_compiled", compiled), torch.no_grad():
        for seed, window in ((1, None), (2, None), (1, 7), (2, 9)):
            end, position, _ = tree_of(forest(seed, 6, longest=12))
            assert padded_length(len(end)) == BLOCK
            parts = heads_of(torch.Generator().manual_seed(0), len(end), 2, 1)
            mask = block_mask(end, position, window)
            tree_attention.attend(*(part.float() for part in parts), mask, scale=0.3, sinks=None)
    assert counter.frame_count == 2, "one for each kind of mask, whatever the tree and the window"


@pytest.mark.slow  # a C++ compiler needs a minute for each kernel
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("window", [None, 400])
def test_a_compiled_kernel_that_visits_the_blocks_of_the_mask_alone_is_right(
    window: int | None, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 1000, 600)
    texts = [np.concatenate([trunk[: 300 * n], rng.integers(0, 1000, 250)]) for n in (1, 1, 2, 2)]
    end, position, _ = tree_of([texts[place] for place in tree_order(texts)])
    mask = block_mask(end, position, window)
    counts = mask.kv_num_blocks.sum(), mask.full_kv_num_blocks.sum()
    assert min(counts) > 0 and sum(counts) < mask.kv_indices.numel() / 2
    query, key, value = (part.float() for part in heads_of(torch.Generator().manual_seed(0), len(end), 4, 2))
    with torch.no_grad():
        found = tree_attention.attend(query, key, value, mask, scale=0.3, sinks=None)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * 0.3
    scores = scores.masked_fill(~dense(end, position, window), -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(2, 1))
    torch.testing.assert_close(found, expected.flatten(1), atol=1e-5, rtol=1e-5)


def test_padded_lengths_are_few_and_close():
    lengths = {padded_length(tokens) for tokens in range(1, 2**17, 61)}
    assert len(lengths) <= 4 * 10 + 4
    for tokens in range(1, 2**17, 61):
        assert tokens <= padded_length(tokens) <= max(BLOCK, 1.25 * tokens + BLOCK)
