"""FLOPs from the geometry, against those that torch counts in transformers' own models."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from slipstream.backend.batch.flops import forward_flops
from slipstream.bridge.families import FAMILIES, model_spec
from tests.models import make_checkpoint


@pytest.mark.parametrize(
    ("family", "sizes"),
    [(family, {}) for family in sorted(FAMILIES)] + [("deepseek_v3", {"q_lora_rank": None})],
)
def test_a_model_computes_what_its_geometry_says(tmp_path, family, sizes):
    folder = make_checkpoint(tmp_path, family, tied=False, num_hidden_layers=3, **sizes)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    geometry = model_spec(folder).geometry

    def counted(tokens: int) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.arange(tokens)[None])
        return counter.get_total_flops() - tokens * geometry.rotated_dim  # the angles of rotary embeddings

    single, many = forward_flops(geometry, np.array([1, 40])).tolist()
    assert single == counted(1)
    # Eager attention multiplies every query with every key, and masks those behind it afterwards.
    assert 2 * (many - 40 * single) == counted(40) - 40 * counted(1)
