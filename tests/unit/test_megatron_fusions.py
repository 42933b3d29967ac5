"""Which fused kernels each family gets on which machine, and why not."""

from dataclasses import replace
from itertools import product

import pytest

from slipstream.backend.megatron.fusions import KernelSupport, chosen_fusions, fusions, head_implementation
from slipstream.bridge.model.geometry import Experts, Geometry, GroupedAttention, Indexer, LatentAttention
from slipstream.bridge.model.rope import Rope
from slipstream.configs.schema import ActorConfig

H100 = KernelSupport(has_gpu=True, has_transformer_engine=True, has_triton=True)
ROPE, ACTIVATION, PERMUTATION = "apply_rope_fusion", "bias_activation_fusion", "moe_permute_fusion"
YARN = Rope(kind="yarn", factor=4.0, original_positions=32768)
LATENT = LatentAttention(128, 1536, 512, plain_dim=128, rotated_dim=64, value_dim=128)
SPARSE = replace(LATENT, indexer=Indexer(64, 128, 2048))
EXPERTS = Experts(128, 8, 768, dense_layers=())
DENSE = Geometry(
    family="qwen3",
    n_layers=36,
    hidden=4096,
    ffn_hidden=12288,
    vocab=151936,
    max_positions=40960,
    tied_embeddings=False,
    norm_eps=1e-6,
    init_std=0.02,
    attention=GroupedAttention(32, 8, 128, qk_norm=True),
    rope=Rope(),
)
MODELS = {
    "qwen2": DENSE,
    "qwen3": DENSE,
    "llama": replace(DENSE, rope=Rope(kind="llama3", factor=8.0, original_positions=8192)),
    "mistral": DENSE,
    "glm4_moe": replace(DENSE, rope=Rope(fraction=0.5), experts=EXPERTS),
    "qwen3_moe": replace(DENSE, experts=EXPERTS),
    "qwen3_next": replace(DENSE, rope=Rope(fraction=0.25), experts=EXPERTS),
    "qwen3_5_text": replace(DENSE, rope=Rope(fraction=0.25)),
    "qwen3_5": replace(DENSE, rope=Rope(fraction=0.25)),
    "qwen3_5_moe": replace(DENSE, rope=Rope(fraction=0.25), experts=EXPERTS),
    "qwen3_5_moe_text": replace(DENSE, rope=Rope(fraction=0.25), experts=EXPERTS),
    "deepseek_v3": replace(DENSE, attention=LATENT, rope=YARN, experts=EXPERTS),
    "kimi_k2": replace(DENSE, attention=LATENT, rope=YARN, experts=EXPERTS),
    "glm4_moe_lite": replace(DENSE, attention=LATENT, experts=EXPERTS),
    "kimi_k25": replace(DENSE, attention=LATENT, rope=YARN, experts=EXPERTS),
    "mistral3": DENSE,
    "qwen3_vl": DENSE,
    "seed_oss": DENSE,
    "minimax_m2": replace(DENSE, rope=Rope(fraction=0.5), experts=EXPERTS),
    "gemma3_text": replace(DENSE, activation="geglu"),
    "gpt_oss": replace(DENSE, rope=YARN, experts=EXPERTS, activation="clamped_swiglu", linear_biases=True),
    "deepseek_v32": replace(DENSE, attention=SPARSE, rope=YARN, experts=EXPERTS),
    "glm_moe_dsa": replace(DENSE, attention=SPARSE, experts=EXPERTS),
    "arcee": replace(DENSE, activation="squared_relu"),
    "deepseek_v2": replace(DENSE, attention=LATENT, rope=YARN, experts=EXPERTS),
    "ernie4_5": replace(DENSE, rope=Rope(interleaved=True)),
    "exaone4": DENSE,
    "gemma": replace(DENSE, activation="geglu"),
    "gemma3": replace(DENSE, activation="geglu"),
    "glm": replace(DENSE, rope=Rope(fraction=0.5, interleaved=True)),
    "glm4": replace(DENSE, rope=Rope(fraction=0.5, interleaved=True)),
    "glm4v_moe": replace(DENSE, rope=Rope(fraction=0.5), experts=EXPERTS),
    "granite": DENSE,
    "nemotron": replace(DENSE, rope=Rope(fraction=0.5), activation="squared_relu"),
    "stablelm": replace(DENSE, rope=Rope(fraction=0.25)),
    "glm4v": replace(DENSE, rope=Rope(fraction=0.5, interleaved=True)),
    "glm46v": replace(DENSE, rope=Rope(fraction=0.5, interleaved=True)),
    "solar_open": replace(DENSE, experts=EXPERTS),
    "youtu": replace(DENSE, attention=LATENT),
    "helium": replace(DENSE, rope=Rope(interleaved=True)),
    "mimo": DENSE,
    "mixtral": replace(DENSE, experts=EXPERTS),
    "olmo2": DENSE,
    "olmoe": replace(DENSE, experts=EXPERTS),
    "phi3": DENSE,
    "qwen2_5_vl": DENSE,
    "qwen2_moe": replace(DENSE, experts=EXPERTS),
    "qwen3_vl_moe": replace(DENSE, experts=EXPERTS),
    "smollm3": DENSE,
    "qwen3 with YaRN": replace(DENSE, rope=YARN),
    "deepseek_v3 without YaRN": replace(DENSE, attention=LATENT, experts=EXPERTS),
}
"""By name: the geometry of a published model of the family, as far as it decides."""


def on(model: str, layer_spec: str = "transformer_engine", machine: KernelSupport = H100) -> set[str]:
    return {name for name, fusion in fusions(MODELS[model], layer_spec, machine).items() if fusion.on}


def test_every_supported_family_is_among_the_models():
    from slipstream.bridge.families import FAMILIES

    assert set(FAMILIES) <= {name.split()[0] for name in MODELS}


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "llama", "mistral"])
def test_dense_models_have_fused_rotary_embeddings_and_activations_on_a_gpu(model):
    assert on(model) == {ROPE, ACTIVATION}


@pytest.mark.parametrize("model", ["glm4_moe", "qwen3_moe", "qwen3_next", "deepseek_v3"])
def test_mixtures_of_experts_have_a_fused_permutation_too(model):
    assert on(model) == {ROPE, ACTIVATION, PERMUTATION}


def test_other_activations_and_biases_have_no_kernel():
    assert on("gemma3_text") == on("arcee") == {ROPE}
    assert on("gpt_oss") == {PERMUTATION}
    assert ACTIVATION not in {
        name
        for name, fusion in fusions(replace(DENSE, linear_biases=True), "local", H100).items()
        if fusion.on
    }


def test_the_kernel_that_drops_the_factor_of_yarn_is_never_used_with_it():
    """On packs Megatron hands the factor of cosines and sines to its plain implementation alone."""
    for spec, machine in product(("local", "transformer_engine"), machines()):
        assert ROPE not in on("qwen3 with YaRN", spec, machine)
    with pytest.raises(ValueError, match=r"apply_rope_fusion is true, but .* leaves out the factor of YaRN"):
        chosen_fusions(MODELS["qwen3 with YaRN"], "transformer_engine", H100, {ROPE: True})


def test_the_kernel_that_rotates_halves_is_never_used_for_neighbours():
    assert on("helium") == {ACTIVATION}


def test_latent_attention_is_fused_with_yarn_alone():
    """Megatron refuses the other case when it builds its config."""
    assert ROPE in on("deepseek_v3") and ROPE not in on("deepseek_v3 without YaRN")


def test_latent_attention_is_not_fused_for_heads_that_its_kernel_cannot_hold():
    odd = replace(MODELS["deepseek_v3"], attention=replace(LATENT, plain_dim=192))
    decision = fusions(odd, "transformer_engine", H100)[ROPE]
    assert not decision.on and "192 plain" in decision.reason


@pytest.mark.parametrize("model", MODELS)
def test_without_a_gpu_nothing_is_fused(model):
    for spec, machine in product(("local", "transformer_engine"), machines()):
        if not machine.has_gpu:
            decisions = fusions(MODELS[model], spec, machine)
            assert not any(decision.on for decision in decisions.values())
            assert all(decision.reason for decision in decisions.values())


@pytest.mark.parametrize("model", MODELS)
def test_layers_in_plain_pytorch_use_no_kernel_of_transformer_engine(model):
    compiled = {ACTIVATION} if MODELS[model].activation == "swiglu" else set()
    assert on(model, "local") == compiled
    assert on(model, machine=replace(H100, has_transformer_engine=False)) == compiled


def test_without_triton_no_kernel_is_compiled():
    machine = replace(H100, has_triton=False)
    assert on("qwen3", machine=machine) == {ROPE}
    assert on("deepseek_v3", machine=machine) == {PERMUTATION}
    assert head_implementation(ActorConfig(), machine) == "chunked"


def test_a_recipe_may_turn_a_fusion_off_and_cannot_turn_on_what_is_not_possible():
    assert chosen_fusions(DENSE, "transformer_engine", H100, {ROPE: False}) == {
        ROPE: True,  # the recipe's own value comes last, in the config
        ACTIVATION: True,
        PERMUTATION: False,
    }
    cpu = KernelSupport(has_gpu=False, has_transformer_engine=False, has_triton=False)
    with pytest.raises(ValueError, match="there is no GPU") as error:
        chosen_fusions(DENSE, "local", cpu, {ROPE: True, ACTIVATION: True})
    assert ROPE in str(error.value) and ACTIVATION in str(error.value)


def test_the_head_is_the_kernels_on_a_gpu_and_refused_elsewhere():
    assert head_implementation(ActorConfig(), H100) == "triton"
    assert head_implementation(ActorConfig(lm_head="chunked"), H100) == "chunked"
    cpu = replace(H100, has_gpu=False)
    assert head_implementation(ActorConfig(), cpu) == "chunked"
    with pytest.raises(ValueError, match="lm_head is triton, but there is no GPU"):
        head_implementation(ActorConfig(lm_head="triton"), cpu)
    with pytest.raises(ValueError, match="the package triton is not installed"):
        head_implementation(ActorConfig(lm_head="triton"), replace(H100, has_triton=False))


def machines() -> list[KernelSupport]:
    return [KernelSupport(*flags) for flags in product((False, True), repeat=3)]
