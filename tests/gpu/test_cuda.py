"""The same parts on a GPU: trainer against transformers, and weights into a server on the device."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.bridge.families import FAMILIES, spec_of
from slipstream.bridge.hf.config import read_config
from slipstream.configs.schema import RunConfig
from tests.integration.test_bridge_logits import logits_of, reference_logits
from tests.integration.test_megatron_parity import (
    config_for,
    logprobs_and_gradients,
    make_batch,
    one_after_the_other,
    reference_gradients,
)
from tests.integration.test_trainer_checkpoint import own_weights, train, trainer_of
from tests.models import make_checkpoint
from tests.ports import held_port
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
"""Of the largest gradient: TF32 is off, and bfloat16 has 8 bits."""
ENGINE_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.1}
"""Transformer Engine multiplies float32 as TF32, of 11 bits."""
SPARSE = {"deepseek_v32", "glm_moe_dsa"}
"""Families that Transformer Engine's layers cannot run (``slipstream.backend.megatron.supported``)."""
FAR = 0.3
"""Largest share of tokens that may be farther away in models that amplify rounding: mixtures of experts whose
scores are close to each other, and delta nets by their recurrence. transformers' own models, multiplying as
TF32 instead of float32, move up to a tenth of the tokens by more than 1e-2, and one by 0.3."""

needs_transformer_engine = pytest.mark.gpu(1, "transformer_engine")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_rank_on_a_gpu_gives_the_gradients_of_transformers(tmp_path: Path, dtype: str):
    folder = make_checkpoint(tmp_path / "model")
    batch = make_batch(vocab=101)
    config = config_for(folder, {}, dtype=dtype)
    _, expected = reference_gradients(folder, batch, temperature=0.8)
    [(_, gradients)] = run_ranks(1, logprobs_and_gradients, config, batch)
    for name, reference in expected.items():
        scale = np.abs(reference).max()
        np.testing.assert_allclose(
            gradients[name] / scale, reference / scale, atol=TOLERANCE[dtype], err_msg=name
        )


@needs_transformer_engine
@pytest.mark.parametrize("dtype", ENGINE_TOLERANCE)
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - SPARSE))
def test_transformer_engine_gives_what_plain_layers_give(tmp_path: Path, family: str, dtype: str):
    """Log-probs and gradients of packs of several trajectories each; of models that amplify rounding, the
    log-probs of most tokens.
    """
    folder = make_checkpoint(tmp_path / "model", family, tied=False)
    batch = make_batch(vocab=101)
    configs = [
        config_for(folder, {}, dtype=dtype, layer_spec=spec) for spec in ("local", "transformer_engine")
    ]
    work = [(held_port(), config) for config in configs]
    [[(logps, gradients), (logps_te, gradients_te)]] = run_ranks(1, one_after_the_other, work, batch)
    assert gradients_te.keys() == gradients.keys() and logps_te.keys() == logps.keys()
    geometry = spec_of(read_config(folder), folder).geometry
    amplifies = geometry.experts is not None or geometry.delta is not None
    for targets, expected in logps.items():
        far = np.abs(logps_te[targets] - expected) > ENGINE_TOLERANCE[dtype]
        assert far.mean() <= (FAR if amplifies else 0), logps_te[targets] - expected
    for name, expected in gradients.items() if not amplifies else ():
        scale = max(np.abs(expected).max(), 1e-20)
        np.testing.assert_allclose(
            gradients_te[name] / scale, expected / scale, atol=ENGINE_TOLERANCE[dtype], err_msg=name
        )


def on_a_gpu_of_its_own(rank: RankSpec, config: RunConfig, batch: TrainBatch):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank.rank)
    return logprobs_and_gradients(rank, config, batch)


@pytest.mark.gpu(2, "transformer_engine")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_two_gpus_that_share_a_context_give_the_gradients_of_transformers(tmp_path: Path, family: str):
    folder = make_checkpoint(tmp_path / "model", family, tied=False)
    batch = make_batch(vocab=101)
    _, expected = reference_gradients(folder, batch, temperature=0.8)
    config = config_for(folder, {"context": 2}, dtype="bfloat16", layer_spec="transformer_engine")
    (_, gradients), _ = run_ranks(2, on_a_gpu_of_its_own, config, batch)
    for name, reference in expected.items():
        scale = max(np.abs(reference).max(), 1e-20)
        np.testing.assert_allclose(
            gradients[name] / scale, reference / scale, atol=TOLERANCE["bfloat16"], err_msg=name
        )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_on_a_gpu_are_those_of_transformers(tmp_path: Path, family: str):
    folder = make_checkpoint(tmp_path / "model", family, tied=False)
    [[found]] = run_ranks(1, logits_of, [folder], {})
    assert np.abs(found - reference_logits(folder)).max() < 1e-3


@pytest.mark.parametrize(
    "implementation", ["chunked", pytest.param("triton", marks=pytest.mark.gpu(1, "triton"))]
)
@pytest.mark.parametrize("float32_logits", [False, True])
@pytest.mark.parametrize("kept", [0, 2**30])
def test_log_probs_of_bfloat16_hidden_states_on_a_gpu(
    monkeypatch, float32_logits: bool, kept: int, implementation: str
):
    """With the width of a small model and the vocabulary of Qwen3."""
    from slipstream.backend.objective import logprob

    monkeypatch.setattr(logprob, "KEPT_BYTES", kept)
    torch.manual_seed(0)
    tokens, width, vocab = 1000, 1024, 151936
    hidden = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocab + 5, width, device="cuda") / 16).bfloat16().requires_grad_()
    target, grad = torch.randint(vocab, (tokens,), device="cuda"), torch.randn(tokens, device="cuda")
    buffer = torch.zeros(weight.shape, device="cuda")
    options = logprob.HeadOptions(
        0.8, vocab, float32_logits=float32_logits, weight_grad=buffer, implementation=implementation
    )
    logp, entropy = logprob.fused_logprob_and_entropy(hidden, weight, target, options)
    logp.backward(grad)
    plain = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = (plain[0] @ plain[1][:vocab].T / 0.8).log_softmax(-1)
    expected_logp = expected.gather(-1, target[:, None])[:, 0]
    expected_logp.backward(grad.double())
    tolerance = 4e-5 if float32_logits else 5e-2
    assert (logp.double() - expected_logp).abs().max() < tolerance
    assert (entropy.double() + (expected.exp() * expected).sum(-1)).abs().max() < tolerance
    for actual, leaf in zip((hidden.grad, buffer), plain, strict=True):
        assert (actual.double() - leaf.grad).abs().max() < 2e-2 * leaf.grad.abs().max()


def memory_and_weights(rank: RankSpec, config: RunConfig):
    """Bytes that tensors hold on the device awake, with weights only, at rest, awake again; equal weights."""
    with trainer_of(rank, config) as trainer:
        train(trainer, 1)
        before, held = own_weights(trainer), [torch.cuda.memory_allocated()]
        for change in (partial(trainer.rest, True), partial(trainer.rest, False), trainer.wake):
            change()
            held.append(torch.cuda.memory_allocated())
        after = own_weights(trainer)
        train(trainer, 1)
        return held, all(np.array_equal(after[name], weight) for name, weight in before.items())


def test_a_trainer_that_rests_leaves_the_memory_of_the_gpu_to_others(tmp_path: Path):
    # Large beside the 64 MiB in which cuBLAS works, and which it keeps.
    folder = make_checkpoint(tmp_path, hidden_size=2048, vocab_size=2**15)
    config = config_for(folder, {}, dtype="bfloat16")
    [(held, same)] = run_ranks(1, memory_and_weights, config)
    awake, weights_only, resting, again = held
    assert resting < 0.05 * awake < weights_only < 0.3 * awake
    assert again == awake
    assert same
