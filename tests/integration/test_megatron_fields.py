"""Fields of ``actor.megatron`` do what they say and nothing else, and auxiliary losses are those of
transformers in every layout."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.installed.megatron_fields import MEGATRON_FIELDS
from slipstream.configs.schema import RunConfig
from tests.integration.test_megatron_parity import (
    config_for,
    gradients_of,
    logprobs_and_gradients,
    make_batch,
    unfused,
)
from tests.models import make_checkpoint, name_in_checkpoints, reference_model
from tests.ranks import Job, run_jobs

VOCAB = 101
COEFFICIENT = 0.1
AUXILIARY = {
    "load balancing": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": COEFFICIENT,
    },
    "z-loss": {"moe_z_loss_coeff": COEFFICIENT},
}
LAYOUTS = {
    "one rank": {},
    "several micro-batches": {},
    "recomputed": {},
    "tensor 2": {"tensor": 2, "sequence": True, "expert_tensor": 1},
    "expert 2, tensor 2": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
    "pipeline 2": {"pipeline": 2},
    "data 2": {"data": 2},
    "expert 2": {"data": 2, "expert": 2},
}
ACTOR: dict[str, dict[str, Any]] = {
    "several micro-batches": {"microbatch_tokens": 64},
    "recomputed": {"recompute": "full", "microbatch_tokens": 64},
}


def without_advantages(batch: TrainBatch) -> TrainBatch:
    """All rewards are equal, so that auxiliary losses alone have a gradient."""
    return replace(batch, trajectories=tuple(replace(each, reward=1.0) for each in batch.trajectories))


def packs_and_gradients(rank: RankSpec, config: RunConfig, batch: TrainBatch):
    """On every rank its micro-batches, as token lists of their segments; on rank 0 also the gradient."""
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    [microbatches], _ = trainer.microbatches(batch)
    packs = [(np.split(micro.tokens_T, micro.cu_seqlens[1:-1]), len(micro.index_M)) for micro in microbatches]
    return packs, gradients_of(trainer, rank, batch)


def expected_gradients(folder, kind: str, packs: list[list[tuple[list[np.ndarray], int]]]):
    """The gradient of transformers' loss, for the micro-batches of each data-parallel rank.

    A rank's micro-batches count by their tokens, and ranks by their tokens with loss.
    """
    model = reference_model(folder)
    total = torch.zeros(())
    with_loss = [sum(count for _, count in rank) for rank in packs]
    tokens = [sum(len(part) for segments, _ in rank for part in segments) for rank in packs]
    for rank, rank_loss, rank_tokens in zip(packs, with_loss, tokens, strict=True):
        for segments, _ in rank:
            per_layer = zip(
                *(
                    model(torch.from_numpy(part)[None], output_router_logits=True).router_logits
                    for part in segments
                    if len(part)
                ),
                strict=True,
            )
            size = sum(map(len, segments))
            for parts in per_layer:
                loss = auxiliary_loss(kind, torch.cat(parts), model.config)
                total = total + COEFFICIENT * loss * size / rank_tokens * rank_loss / sum(with_loss)
    total.backward()
    named = [(name, p.grad.numpy()) for name, p in model.named_parameters() if p.grad is not None]
    return {name_in_checkpoints(model, name): gradient for name, gradient in unfused(named)}


def auxiliary_loss(kind: str, logits, config) -> torch.Tensor:
    """That of a layer. transformers adds up the shares of a token's k choices; Megatron averages them."""
    if kind == "z-loss":
        return torch.logsumexp(logits.float(), dim=-1).square().mean()
    chosen = config.num_experts_per_tok
    return load_balancing_loss_func((logits,), config.num_experts, chosen) / chosen


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", tied=False)


@pytest.fixture(scope="module")
def auxiliary(experts):
    batch = without_advantages(make_batch(VOCAB))
    jobs = {}
    for layout, parallel in LAYOUTS.items():
        for kind, fields in AUXILIARY.items():
            actor = {"microbatch_tokens": 4000, "megatron": fields, **ACTOR.get(layout, {})}
            config = config_for(experts, parallel, **actor)
            jobs[layout, kind] = Job(config.actor.parallel.world_size, packs_and_gradients, (config, batch))
    return run_jobs(jobs)


def assert_has_auxiliary_gradients(folder, kind: str, packs, found) -> None:
    expected = expected_gradients(folder, kind, packs)
    assert any(np.abs(gradient).max() > 1e-4 for name, gradient in expected.items() if ".gate." in name)
    for name, gradient in found.items():
        reference = expected.get(name, np.zeros_like(gradient))
        scale = max(np.abs(reference).max(), 1e-5)
        np.testing.assert_allclose(gradient / scale, reference / scale, atol=5e-4, err_msg=name)


@pytest.mark.parametrize("kind", AUXILIARY)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_auxiliary_losses_have_the_gradient_of_transformers(experts, auxiliary, layout: str, kind: str):
    results = auxiliary[layout, kind]
    replicas = LAYOUTS[layout].get("data", 1)
    assert_has_auxiliary_gradients(experts, kind, [packs for packs, _ in results[:replicas]], results[0][1])


UNCHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "the first layers recomputed": (
        "qwen3_moe",
        {"recompute": "full", "megatron": {"recompute_method": "block", "recompute_num_layers": 2}},
    ),
    "two layers recomputed at once": (
        "qwen3_moe",
        {"recompute": "full", "megatron": {"recompute_method": "uniform", "recompute_num_layers": 2}},
    ),
    "attention and experts recomputed": (
        "qwen3_moe",
        {"recompute": "selective", "megatron": {"recompute_modules": ["core_attn", "moe"]}},
    ),
    "dense layers and shared experts recomputed": (
        "deepseek_v3",
        {"recompute": "selective", "megatron": {"recompute_modules": ["mlp", "shared_experts"]}},
    ),
    "deterministic": ("qwen3_moe", {"megatron": {"deterministic_mode": True}}),
    "router in double precision": ("deepseek_v3", {"megatron": {"moe_router_dtype": "fp64"}}),
    "without effect": (
        "qwen3_moe",
        {
            "megatron": {
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
                "moe_token_dispatcher_type": "alltoall",
                "attention_backend": "auto",
            }
        },
    ),
}


@pytest.fixture(scope="module")
def unchanged(experts, tmp_path_factory):
    latent = make_checkpoint(tmp_path_factory.mktemp("deepseek_v3"), "deepseek_v3", tied=False)
    folders = {"qwen3_moe": experts, "deepseek_v3": latent}
    plain: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in folders}
    batch, jobs = make_batch(VOCAB), {}
    for name, (family, actor) in {**plain, **UNCHANGED}.items():
        jobs[name] = Job(1, logprobs_and_gradients, (config_for(folders[family], {}, **actor), batch))
    return run_jobs(jobs)


@pytest.mark.parametrize("name", UNCHANGED)
def test_allowed_fields_change_neither_log_probs_nor_gradients(unchanged, name: str):
    family, actor = UNCHANGED[name]
    for field, value in actor["megatron"].items():
        assert MEGATRON_FIELDS[field].kind == "allowed" and MEGATRON_FIELDS[field].permits(value)
    [(logps, gradients)], [(plain_logps, plain_gradients)] = unchanged[name], unchanged[family]
    assert logps.keys() == plain_logps.keys() and gradients.keys() == plain_gradients.keys()
    for key, values in logps.items():
        np.testing.assert_allclose(values, plain_logps[key], atol=2e-5)
    for key, gradient in gradients.items():
        scale = max(np.abs(plain_gradients[key]).max(), 1e-9)
        np.testing.assert_allclose(gradient / scale, plain_gradients[key] / scale, atol=1e-4, err_msg=key)
