"""Rotary embeddings of packed sequences by the position of each token, without a look at the boundaries.

Megatron's plain implementation reads the boundaries of a pack on the host, twice for queries and twice for
keys of every layer, and since 0.19 rotates segment by segment: 64 segments take more than 1,500 operations a
layer. Here all tokens are rotated at once, by cosines and sines that are gathered once for each micro-batch.
Where Transformer Engine's kernel is legal it is used instead (``fusions``).
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor


class _Waves(NamedTuple):
    """Cosines and sines of all tokens, [t, 1, d], and what they were computed from."""

    freqs: Tensor
    mscale: float
    cos_t1d: Tensor
    sin_t1d: Tensor


@dataclass
class _Rotation:
    position_t: Tensor
    """Position of each of this rank's tokens within its segment."""
    waves: list[_Waves] = field(default_factory=list[_Waves])
    """Angles of each rotary embedding of the model: one, or two if layers with a window have their own."""


def install() -> None:
    """Replace Megatron's plain rotation of packed sequences."""
    rope_utils._apply_rotary_pos_emb_thd = rotated


def set_positions(cu_seqlens: Tensor, position_t: Tensor) -> None:
    """Give ``rotated`` the positions of a pack's tokens, by the boundaries of the pack."""
    # Megatron's rotary functions are given nothing of a pack but its boundaries.
    cast(Any, cu_seqlens).slipstream_rotation = _Rotation(position_t)


def rotated(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool | None = False,
    mscale: float = 1.0,
    cp_group: object = None,
    mla_rotary_interleaved: bool = False,
) -> Tensor:
    """Return queries or keys [t, heads, d] rotated by their positions; Megatron's signature.

    freqs: angles [positions, 1, 1, rotated], of which each token takes the row of its position; further
    dimensions of a head stay as they are. mscale: factor of cosines and sines. rotary_interleaved: the pairs
    that are rotated together are adjacent, and ``freqs`` has the angle of each pair twice in a row. In latent
    attention (``multi_latent_attention`` before Megatron 0.19, ``mla_rotary_interleaved`` since) they are
    adjacent before, and half a head apart afterwards.

    Raises ValueError for boundaries without positions.
    """
    rotation: _Rotation | None = getattr(cu_seqlens, "slipstream_rotation", None)
    if rotation is None:
        raise ValueError("the pack has no positions: make it by device_batch.pack")
    _, _, cos_t1d, sin_t1d = _waves(rotation, freqs, mscale, t.dtype)
    width = cos_t1d.shape[-1]
    head, rest = t[..., :width], t[..., width:]
    if multi_latent_attention or mla_rotary_interleaved:
        head = torch.cat((head[..., 0::2], head[..., 1::2]), dim=-1)
    if rotary_interleaved:
        across = torch.stack((-head[..., 1::2], head[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = head.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
    turned = head * cos_t1d + across * sin_t1d
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _waves(rotation: _Rotation, freqs: Tensor, mscale: float, dtype: torch.dtype) -> _Waves:
    """Return the waves of a micro-batch. The layers share them: their angles are in the same memory."""
    for known in rotation.waves:
        if (
            known.freqs.data_ptr() == freqs.data_ptr()
            and known.freqs.shape == freqs.shape
            and known.mscale == mscale
            and known.cos_t1d.dtype is dtype
        ):
            return known
    with torch.no_grad():
        cos, sin = ((wave(freqs) * mscale).to(dtype) for wave in (torch.cos, torch.sin))
        gathered = (wave.squeeze(1).index_select(0, rotation.position_t) for wave in (cos, sin))
        waves = _Waves(freqs, mscale, *gathered)
    rotation.waves.append(waves)
    return waves
