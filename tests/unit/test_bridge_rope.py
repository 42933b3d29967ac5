"""Rotary frequencies, compared with those of transformers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.rope import rope_of
from tests.tries import tries

VARIANTS = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": st.floats(1, 16)}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": st.floats(1, 32),
            "low_freq_factor": st.sampled_from([1.0, 2.0]),
            "high_freq_factor": st.sampled_from([4.0, 8.0]),
            "original_max_position_embeddings": st.sampled_from([64, 8192]),
        }
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "factor": st.floats(1, 64),
            "original_max_position_embeddings": st.sampled_from([64, 4096]),
        },
        optional={
            "beta_fast": st.sampled_from([32.0, 16.0]),
            "beta_slow": st.sampled_from([1.0, 2.0]),
            "mscale": st.sampled_from([0.707, 1.0]),
            "mscale_all_dim": st.sampled_from([0.707, 1.0]),
            "truncate": st.booleans(),
        },
    ),
)


@tries(50)
@given(VARIANTS, st.sampled_from([1e4, 5e5, 1e6]), st.sampled_from([4, 16, 64, 128]))
def test_frequencies_are_those_of_transformers(variant, theta, dimensions):
    hf = {"rope_theta": theta, "max_position_embeddings": 131072, "rope_scaling": variant}
    rope = rope_of(hf)
    config = LlamaConfig(
        hidden_size=2 * dimensions,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={**variant, "rope_theta": theta},
    )
    expected, _ = ROPE_INIT_FUNCTIONS[variant["rope_type"]](config, "cpu")
    frequencies = torch.tensor(rope.frequencies(dimensions), dtype=torch.float64)
    torch.testing.assert_close(frequencies, expected.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({}, 10_000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_theta": 7.0, "rope_scaling": None}, 7.0),
    ],
)
def test_the_base_is_read_in_either_spelling(config, theta):
    assert rope_of(config).theta == theta
    assert rope_of(config).frequencies(4) == [1.0, theta**-0.5]


def test_the_rotated_fraction_is_the_family_s_unless_the_config_states_it():
    assert rope_of({}, fraction=0.5).fraction == 0.5
    assert rope_of({"partial_rotary_factor": 0.25}, fraction=0.5).fraction == 0.25
    assert rope_of({"rope_parameters": {"partial_rotary_factor": 1.0}}, fraction=0.5).fraction == 1.0


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope type 'longrope' is not mapped; supported: default"),
        ({"type": "dynamic", "factor": 2.0}, "rope type 'dynamic'"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}, "'yarn' with attention_factor"),
        ({"rope_type": "linear"}, "'linear' without a factor"),
        ("linear", "expected a JSON object"),
    ],
)
def test_an_unknown_variant_or_parameter_is_refused(rope, message):
    with pytest.raises(UnsupportedModel, match=message):
        rope_of({"rope_scaling": rope})
