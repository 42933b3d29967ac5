"""Packs of 16k tokens through layers with the heads of published models, fused and in plain PyTorch."""

from pathlib import Path

import numpy as np
import pytest

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.integration.test_megatron_parity import config_for, one_after_the_other
from tests.integration.test_trainer_checkpoint import trainer_of
from tests.models import make_checkpoint
from tests.ports import held_port
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

TOKENS, VOCAB = 2**14, 32000
MODELS = {
    "head dimension 128": (
        "qwen3",
        "",
        {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "latent attention 192/128": (
        "deepseek_v3",
        "yarn, DeepSeek",
        {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
    "head dimension 128, YaRN": (
        "qwen3",
        "yarn",
        {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    ),
}
"""By name: the family, its rotary embedding and its sizes."""


def checkpoint_of(folder: Path, model: str) -> Path:
    family, rope, sizes = MODELS[model]
    return make_checkpoint(
        folder / "model",
        family,
        rope=rope,
        tied=False,
        vocab_size=VOCAB,
        num_hidden_layers=2,
        intermediate_size=4096,
        max_position_embeddings=TOKENS,
        initializer_range=0.02,
        **sizes,
    )


def batch_of(segments: int, shared: int = 0) -> TrainBatch:
    """Trajectories of 16k tokens together, of unequal lengths if there are several.

    shared: first tokens of all in common.
    """
    rng = np.random.default_rng(segments)
    stem = rng.integers(0, VOCAB, shared)
    cuts = np.sort(rng.choice(np.arange(1, TOKENS // 8), segments - 1, replace=False)) * 8
    trajectories = []
    for number, length in enumerate(np.diff([0, *cuts, TOKENS])):
        sampled = np.arange(length) >= length // 2
        trajectories.append(
            Trajectory(
                np.concatenate([stem, rng.integers(0, VOCAB, length)])[:length],
                sampled,
                np.where(sampled, -10.0, 0).astype(np.float32),
                np.where(sampled, 0, UNSAMPLED).astype(np.int32),
                Finish.STOP,
                reward=float(number % 2),
            )
        )
    return TrainBatch(0, tuple(trajectories), np.arange(segments) // 2)


@pytest.mark.gpu(1, "transformer_engine")
@pytest.mark.parametrize("segments", [1, 64])
@pytest.mark.parametrize("model", MODELS)
def test_fused_layers_give_the_log_probs_and_gradients_of_plain_ones(
    tmp_path: Path, model: str, segments: int
):
    folder, batch = checkpoint_of(tmp_path, model), batch_of(segments)
    configs = [
        config_for(
            folder,
            {},
            dtype="bfloat16",
            layer_spec=spec,
            lm_head=head,
            microbatch_tokens=TOKENS,
            advantage=[{"type": "reward", "estimator": "reward"}],
        )
        for spec, head in (("local", "chunked"), ("transformer_engine", "auto"))
    ]
    work = [(held_port(), config) for config in configs]
    [[(logps, gradients), (fused_logps, fused_gradients)]] = run_ranks(1, one_after_the_other, work, batch)
    for targets, expected in logps.items():
        assert np.abs(fused_logps[targets] - expected).mean() < 2e-2
    for name, expected in gradients.items():
        scale = max(np.linalg.norm(expected), 1e-20)
        assert np.linalg.norm(fused_gradients[name] - expected) < 5e-2 * scale, name


@pytest.mark.gpu(1, "triton")
@pytest.mark.parametrize("model", MODELS)
def test_shared_prefixes_give_the_gradients_of_repeated_ones(tmp_path: Path, model: str):
    folder, batch = checkpoint_of(tmp_path, model), batch_of(16, shared=400)
    configs = [
        config_for(
            folder,
            {},
            dtype="bfloat16",
            layer_spec="local",
            share_prefixes=share,
            microbatch_tokens=TOKENS,
            advantage=[{"type": "reward", "estimator": "reward"}],
        )
        for share in ("off", "auto")
    ]
    work = [(held_port(), config) for config in configs]
    [[(_, gradients), (_, shared_gradients)]] = run_ranks(1, one_after_the_other, work, batch)
    for name, expected in gradients.items():
        scale = max(np.linalg.norm(expected), 1e-20)
        assert np.linalg.norm(shared_gradients[name] - expected) < 5e-2 * scale, name


def synchronizations(rank: RankSpec, config: RunConfig, batch: TrainBatch) -> int:
    """Run the second of two passes where torch raises at every wait of the host for the device."""
    import torch

    with trainer_of(rank, config) as trainer:
        [microbatches], _ = trainer.microbatches(batch)
        policy = trainer._policy
        policy.log_probs(microbatches, 1.0)  # compiles and allocates
        forward = policy._forward
        passes = 0

        def watched(*args):
            nonlocal passes
            passes += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return forward(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        policy._forward = watched
        policy.log_probs(microbatches, 1.0)
        return passes


@pytest.mark.parametrize(
    "spec",
    [
        "local",
        pytest.param("transformer_engine", marks=pytest.mark.gpu(1, "transformer_engine")),
        pytest.param("prefixes shared", marks=pytest.mark.gpu(1, "triton")),
    ],
)
def test_the_host_never_waits_for_the_device_inside_a_forward_pass(tmp_path: Path, spec: str):
    shares = spec == "prefixes shared"
    config = config_for(
        checkpoint_of(tmp_path, "head dimension 128"),
        {},
        dtype="bfloat16",
        layer_spec="local" if shares else spec,
        share_prefixes="auto" if shares else "off",
        microbatch_tokens=TOKENS,
        advantage=[{"type": "reward", "estimator": "reward"}],
    )
    assert run_ranks(1, synchronizations, config, batch_of(64, shared=200 * shares)) == [1]
