"""Rotation of packs by position, against Megatron's own one segment after the other."""

from itertools import product

import pytest
import torch

from slipstream.backend.megatron.parallel import RankSpec, prepare_imports
from tests.ranks import run_ranks

LENGTHS = [3, 1, 8, 5]
KINDS = ((16, "halves"), (8, "halves"), (16, "latent"), (16, "neighbours"), (8, "neighbours"))
CASES = list(product(("float32", "bfloat16"), (1.0, 1.3), KINDS))
"""The dtype, the factor of cosines and sines, the rotated dimensions of 16, and which of them form a pair:
those half of them apart, neighbours, or neighbours that are apart afterwards (in latent attention)."""


def inputs(rotated: int, dtype: torch.dtype, *, twice_in_a_row: bool = False):
    from slipstream.backend.megatron import rotation

    generator = torch.Generator().manual_seed(0)
    t = torch.randn(sum(LENGTHS), 3, 16, generator=generator).to(dtype)
    angles = torch.outer(torch.arange(8.0), torch.rand(rotated // 2, generator=generator))
    pairs = angles.repeat_interleave(2, -1) if twice_in_a_row else torch.cat((angles, angles), -1)
    freqs = pairs[:, None, None]
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    rotation.set_positions(cu_seqlens, torch.cat([torch.arange(length) for length in LENGTHS]))
    return t, freqs, cu_seqlens


def equal_rotations(rank: RankSpec) -> list[bool]:
    """For each case, whether both rotations are equal to the last bit."""
    prepare_imports()
    import inspect

    from megatron.core.models.common.embeddings import rope_utils

    from slipstream.backend.megatron import rotation

    plain = rope_utils._apply_rotary_pos_emb_bshd
    [latent_option] = {"multi_latent_attention", "mla_rotary_interleaved"} & set(
        list(inspect.signature(plain).parameters)[3:4]
    )
    equal = []
    for dtype, mscale, (rotated, kind) in CASES:
        interleaved = kind == "neighbours"
        t, freqs, cu_seqlens = inputs(rotated, getattr(torch, dtype), twice_in_a_row=interleaved)
        options = {latent_option: kind == "latent", "rotary_interleaved": interleaved, "mscale": mscale}
        parts = [plain(part[:, None], freqs[: len(part)], **options)[:, 0] for part in t.split(LENGTHS)]
        equal.append(torch.equal(rotation.rotated(t, cu_seqlens, freqs, **options), torch.cat(parts)))
    return equal


def test_a_pack_is_rotated_as_its_segments_alone_to_the_last_bit():
    assert run_ranks(1, equal_rotations) == [[True] * len(CASES)]


def shared_waves(rank: RankSpec) -> list[bool]:
    """Return whether angles in the same memory share waves, whether another factor does, and its effect."""
    prepare_imports()
    from slipstream.backend.megatron import rotation

    t, freqs, cu_seqlens = inputs(16, torch.float32)
    state = cu_seqlens.slipstream_rotation
    single = rotation.rotated(t, cu_seqlens, freqs)
    rotation.rotated(t, cu_seqlens, freqs[:])  # a slice of the same angles, as latent attention makes
    same = len(state.waves) == 1
    doubled = rotation.rotated(t, cu_seqlens, freqs, mscale=2.0)
    rotation.rotated(t, cu_seqlens, freqs)
    return [same, len(state.waves) == 1, torch.allclose(doubled, 2 * single)]


def test_layers_share_the_waves_of_a_micro_batch_and_no_other_ones():
    assert run_ranks(1, shared_waves) == [[True, False, True]]


def refuse(rank: RankSpec) -> None:
    prepare_imports()
    from slipstream.backend.megatron import rotation

    t, freqs, _ = inputs(16, torch.float32)
    with pytest.raises(ValueError, match=r"make it by device_batch\.pack"):
        rotation.rotated(t, torch.tensor([0, len(t)]), freqs)


def test_boundaries_without_positions_are_refused():
    run_ranks(1, refuse)
