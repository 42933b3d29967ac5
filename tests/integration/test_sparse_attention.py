"""The indexer of sparse attention against its formula, one pair of tokens at a time in double precision."""

from types import SimpleNamespace

import numpy as np
import torch

from slipstream.backend.megatron.parallel import RankSpec, prepare_imports
from slipstream.bridge.model.geometry import Indexer
from tests.ranks import run_ranks

HIDDEN, RANK, ROTATED, HEADS, DIM, CHOSEN = 20, 12, 8, 5, 16, 6
LENGTHS = (5, 17, 9)
"""Of three classes of lengths; the first needs no choice."""


def masks(rank: RankSpec, indexer: Indexer) -> tuple[list[np.ndarray | None], dict[str, np.ndarray]]:
    """Return what each segment's tokens attend to, and everything that it depends on."""
    prepare_imports()
    from slipstream.backend.megatron.device_batch import pack
    from slipstream.backend.megatron.sparse_attention import TokenIndexer

    generator = torch.Generator().manual_seed(0)
    config = SimpleNamespace(q_lora_rank=RANK, hidden_size=HIDDEN, params_dtype=torch.float32)
    module = TokenIndexer(config, indexer)
    for parameter in module.parameters():
        assert not parameter.requires_grad
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    total = sum(LENGTHS)
    inputs = {
        "hidden": torch.randn(total, HIDDEN, generator=generator),
        "query": torch.randn(total, RANK, generator=generator),
        "frequencies": torch.rand(ROTATED // 2, generator=generator),
    }
    angles = torch.outer(torch.arange(max(LENGTHS)).float(), inputs["frequencies"])
    angles = torch.cat([angles, angles], dim=-1)[:, None, None]
    packed = pack(np.array([0, *np.cumsum(LENGTHS)]), torch.device("cpu"))
    found = module(inputs["hidden"], inputs["query"], angles, 1.5, packed, packed.unpacked)
    known = inputs | {name: parameter.detach() for name, parameter in module.named_parameters()}
    return (
        [None if mask is None else mask[0, 0].numpy() for mask in found],
        {name: tensor.double().numpy() for name, tensor in known.items()},
    )


def turned(vector: np.ndarray, angles: np.ndarray, *, interleaved: bool) -> np.ndarray:
    """Rotate the first dimensions of a vector, by pairs, and multiply cosines and sines by 1.5."""
    out = vector.copy()
    for i, angle in enumerate(angles):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + len(angles))
        x, y = vector[first], vector[second]
        out[first] = 1.5 * (x * np.cos(angle) - y * np.sin(angle))
        out[second] = 1.5 * (y * np.cos(angle) + x * np.sin(angle))
    return out


def expected(known: dict[str, np.ndarray], *, interleaved: bool) -> list[np.ndarray]:
    found, start = [], 0
    for length in LENGTHS:
        hidden, query = (known[name][start : start + length] for name in ("hidden", "query"))
        start += length
        keys, queries = [], []
        for position in range(length):
            angles = position * known["frequencies"]
            key = known["wk.weight"] @ hidden[position]
            key = (key - key.mean()) / np.sqrt(key.var() + 1e-6)
            key = key * known["k_norm.weight"] + known["k_norm.bias"]
            keys.append(turned(key, angles, interleaved=interleaved))
            heads = (known["wq_b.weight"] @ query[position]).reshape(HEADS, DIM)
            queries.append([turned(head, angles, interleaved=interleaved) for head in heads])
        mask = np.zeros((length, length), bool)
        for t in range(length):
            weights = known["weights_proj.weight"] @ hidden[t]
            scores = [
                sum(w * max(q @ keys[s], 0.0) for w, q in zip(weights, queries[t], strict=True))
                for s in range(t + 1)
            ]
            mask[t, np.argsort(scores)[::-1][:CHOSEN]] = True
        found.append(mask)
    return found


def test_the_indexer_chooses_the_tokens_with_the_highest_scores():
    for interleaved in (False, True):
        [(found, known)] = run_ranks(1, masks, Indexer(HEADS, DIM, CHOSEN, interleaved=interleaved))
        first, *others = expected(known, interleaved=interleaved)
        assert found[0] is None and np.array_equal(first, np.tri(LENGTHS[0], dtype=bool))
        for mask, right in zip(found[1:], others, strict=True):
            np.testing.assert_array_equal(mask, right)
            assert mask.sum(1).tolist() == [min(t + 1, CHOSEN) for t in range(len(mask))]
