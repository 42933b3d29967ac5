"""FLOPs from the geometry, against those that torch counts in transformers' own models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slipstream.backend.batch.flops import forward_flops
from slipstream.bridge.families import FAMILIES, model_spec
from tests.models import make_checkpoint, reference_model

LIMITED = {
    "deepseek_v32": "index_topk",
    "exaone4": "sliding_window",
    "gemma3": "sliding_window",
    "gemma3_text": "sliding_window",
    "glm_moe_dsa": "index_topk",
    "gpt_oss": "sliding_window",
}
"""The setting that limits how many tokens a token attends to; eager attention multiplies all pairs."""


def token_by_token(query, key, value, *, g, beta, **_):
    """The gated delta rule as it is defined, in matrix products that torch counts. [1, L, heads, ...]"""
    state, outputs = query.new_zeros(query.shape[2], query.shape[3], value.shape[3]), []
    for q, k, v, decay, rate in zip(query[0], key[0], value[0], g[0], beta[0], strict=True):
        state = state * decay.exp()[:, None, None]
        error = rate[:, None] * (v - (k[:, None] @ state)[:, 0])
        state = state + k[:, :, None] @ error[:, None]
        outputs.append((q[:, None] @ state)[:, 0] * q.shape[-1] ** -0.5)
    return torch.stack(outputs)[None], None


@pytest.mark.parametrize(
    ("family", "sizes"),
    [(family, {}) for family in sorted(FAMILIES.keys() - LIMITED.keys())]
    + [(family, {setting: 40}) for family, setting in LIMITED.items()]
    + [("deepseek_v3", {"q_lora_rank": None})],
)
def test_a_model_computes_what_its_geometry_says(tmp_path, family, sizes):
    folder = make_checkpoint(tmp_path, family, tied=False, num_hidden_layers=3, **sizes)
    model = reference_model(folder, experts_implementation="eager")
    geometry = model_spec(folder).geometry
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):
            module.chunk_gated_delta_rule = token_by_token

    ropes = 2 if geometry.window and geometry.window.rope else 1

    def counted(tokens: int) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.arange(tokens)[None], use_cache=False)
        convolutions = counter.get_flop_counts()["Global"].get(torch.ops.aten.convolution, 0)
        several = ("glm46v", "glm4v", "qwen2_5_vl", "qwen3_5", "qwen3_vl")  # time, height, width
        positions = 3 if family.startswith(several) else 1
        angles = tokens * positions * geometry.rotated_dim * ropes  # of rotary embeddings
        return counter.get_total_flops() - convolutions - angles

    single, many = forward_flops(geometry, np.array([1, 40])).tolist()
    assert single == counted(1)
    # Eager attention multiplies every query with every key, and masks those behind it afterwards.
    assert 2 * (many - 40 * single) == counted(40) - 40 * counted(1)


def test_a_window_limits_the_pairs_of_its_layers(tmp_path):
    folder = make_checkpoint(tmp_path, "gpt_oss", tied=False, sliding_window=6)
    geometry = model_spec(folder).geometry
    assert geometry.window is not None and geometry.window.layers == (0, 2)
    length = 40
    attended = sum(min(token + 1, 6) for token in range(length))
    hidden = sum(range(1, length + 1)) - attended
    unlimited = replace(geometry, window=None)
    [many], [all_pairs] = (forward_flops(g, np.array([length])) for g in (geometry, unlimited))
    assert all_pairs - many == 2 * hidden * len(geometry.window.layers) * 2 * 4 * 24
