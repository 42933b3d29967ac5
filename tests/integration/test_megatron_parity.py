"""Megatron's log-probs and gradients against transformers, at every layout that two processes can run."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.bridge.families import FAMILIES as ALL_FAMILIES
from slipstream.bridge.hf.index import stored_tensors
from slipstream.configs.schema import RunConfig
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.bridge_cases import MIXTURES
from tests.models import (
    make_checkpoint,
    name_in_checkpoints,
    reference_logprobs,
    reference_model,
    stack_experts,
)
from tests.ports import held_port
from tests.ranks import Job, run_jobs, run_ranks
from tests.selection import chosen, shortened

LAYOUTS = {
    "one rank": {},
    "tensor 2": {"tensor": 2},
    "tensor 2 + sequence": {"tensor": 2, "sequence": True},
    "pipeline 2": {"pipeline": 2},
    "data 2": {"data": 2},
    "virtual pipeline 2": {"pipeline": 2, "virtual_pipeline": 2},
    "expert 2": {"data": 2, "expert": 2},
    "expert 2, tensor 2": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
    "tensor 2, whole experts": {"tensor": 2, "sequence": True, "expert_tensor": 1},
    "tensor 2, shared experts": {"tensor": 2, "sequence": True},
    "data 2, shared experts": {"data": 2, "expert_tensor": 2},
    "pipeline 2, recomputation": {"pipeline": 2},
}
ACTOR = {"pipeline 2, recomputation": {"recompute": "selective"}}
"""Further settings of the actor."""


def config_for(
    model: Path, parallel: dict, *, weights: dict | None = None, dtype: str = "float32", **actor
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "weights": weights or {},
            "run": {"name": "test", "steps": 1, "step_timeout_s": 60},
            "model": {"path": str(model), "dtype": dtype},
            "data": {"path": "unused.jsonl"},
            "actor": {
                "parallel": parallel,
                "microbatch_tokens": 64,
                "optimizer": {"clip_grad": 0.0},
                **actor,
            },
            "rollout": {
                "max_head_offpolicyness": 4,
                "batch_size": 4,
                "n_samples_per_prompt": 2,
                "sampling": {"temperature": 0.8},
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
        }
    )


def make_batch(vocab: int, n: int = 8, seed: int = 0, version: int = 0) -> TrainBatch:
    rng = np.random.default_rng(seed)
    trajectories = []
    for i in range(n):
        prompt, response = rng.integers(2, 9), rng.integers(1, 40)
        sampled = np.arange(prompt + response) >= prompt
        trajectories.append(
            Trajectory(
                rng.integers(0, vocab, prompt + response),
                sampled,
                np.where(sampled, -rng.exponential(2.0, prompt + response), 0).astype(np.float32),
                np.where(sampled, version, UNSAMPLED).astype(np.int32),
                Finish.STOP,
                reward=float(i % 3 == 0),
            )
        )
    return TrainBatch(version, tuple(trajectories), np.arange(n) // 2)


def logprobs_and_gradients(rank: RankSpec, config: RunConfig, batch: TrainBatch):
    """On every rank: its log-probs before the step, {target tokens: values}; on rank 0 also the gradient of
    the step's one update, in HF names."""
    from slipstream.backend.trainer.rank import TrainerRank

    return computed(TrainerRank(config, rank), rank, batch)


def computed(trainer: Any, rank: RankSpec, batch: TrainBatch):
    """``logprobs_and_gradients`` of a trainer that is there."""
    [microbatches], _ = trainer.microbatches(batch)
    values = trainer._policy.log_probs(microbatches, trainer._config.rollout.sampling.temperature)
    logps = {
        tuple(micro.target_M): logp.cpu().numpy()
        for micro, logp in zip(microbatches, values, strict=True)
        if logp is not None
    }
    return logps, gradients_of(trainer, rank, batch)


def gradients_of(trainer: Any, rank: RankSpec, batch: TrainBatch):
    """On rank 0 the gradient of a step's one update, in HF names."""
    from slipstream.bridge.shards.export import export

    trainer._trained.optimizer.step = lambda: (True, 0.0, 0)  # leaves the gradient where it can be read
    trainer.train(batch)
    gradients = [
        {name: getattr(tensor, "main_grad", tensor) for name, tensor in part.items()}
        for part in trainer._parameters
    ]
    exported = {}
    for bucket in export(trainer._plan, gradients, rank.rank):
        if bucket is not None:
            exported.update({name: tensor.cpu().clone().numpy() for name, tensor in bucket.tensors()})
    return exported


def reference_gradients(folder: Path, batch: TrainBatch, temperature: float):
    """Log-probs of each trajectory's sampled tokens, and the first update's gradient, in HF names."""
    model = reference_model(folder)
    logps, loss = reference_loss(model, batch, temperature)
    loss.backward()
    gradients = [(name, p.grad.numpy()) for name, p in model.named_parameters() if p.grad is not None]
    if not any(name.endswith(".experts.gate_up_proj") for name in stored_tensors(folder)):
        gradients = unfused(gradients)
    return logps, {name_in_checkpoints(model, name): gradient for name, gradient in gradients}


def reference_loss(model, batch: TrainBatch, temperature: float):
    """That of decoupled PPO at the first update, where the ratio is 1: its gradient is -w A grad log pi,
    averaged over tokens. And the log-probs."""
    rewards = torch.tensor([t.reward for t in batch.trajectories], dtype=torch.float64).view(-1, 2)
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    total, tokens, logps = 0.0, 0, []
    for trajectory, a in zip(batch.trajectories, advantage, strict=True):
        logp = reference_logprobs(model, trajectory.tokens_T, temperature)
        mask = torch.from_numpy(trajectory.loss_mask_T[1:])
        behaviour = torch.from_numpy(trajectory.logprobs_T[1:])[mask]
        logp = logp[mask]
        weight = (logp.detach() - behaviour).exp().clamp(max=5.0)
        total = total - (weight * a.float() * (logp - logp.detach()).exp()).sum()
        tokens += int(mask.sum())
        logps.append(logp.detach().numpy())
    return logps, total / tokens


def unfused(gradients):
    """transformers keeps the experts of a layer in two tensors; in a checkpoint each may have three."""
    for name, value in gradients:
        layer, _, which = name.partition(".experts.")
        if which == "gate_up_proj":
            for i, expert in enumerate(value):
                gate, up = np.split(expert, 2)
                yield f"{layer}.experts.{i}.gate_proj.weight", gate
                yield f"{layer}.experts.{i}.up_proj.weight", up
        elif which == "down_proj":
            for i, expert in enumerate(value):
                yield f"{layer}.experts.{i}.down_proj.weight", expert
        else:
            yield name, value


def one_after_the_other(rank: RankSpec, work: list[tuple[int, RunConfig]], batch: TrainBatch):
    """``logprobs_and_gradients`` for each port and config, in processes that start once."""
    from slipstream.backend.megatron.parallel import leave

    found = []
    for port, config in work:
        found.append(logprobs_and_gradients(replace(rank, port=port), config, batch))
        leave()
    return found


CLASSIC = ("kimi_k2", "glm4_moe_lite", "seed_oss", "minimax_m2")
OTHER_ATTENTION = ("gemma3_text", "gpt_oss", "deepseek_v32", "glm_moe_dsa")
VARIANTS = (
    "glm4",
    "olmo2",
    "exaone4",
    "smollm3",
    "phi3",
    "stablelm",
    "nemotron",
    "granite",
    "arcee",
    "helium",
)
"""Families that differ from Llama in norms, rotation, feed-forward network or stored form."""
SOFTMAX_EXPERTS = ("mixtral", "olmoe", "qwen2_moe", "deepseek_v2")
FEW = ("qwen3, tied", "qwen2", "qwen3_moe", *CLASSIC, *OTHER_ATTENTION, "qwen3_vl", "exaone4", "nemotron")
FAMILIES = {
    "one rank": (
        *FEW,
        *sorted({*VARIANTS, *SOFTMAX_EXPERTS} - {*FEW}),
        *(
            "ernie4_5",
            "gemma, tied",
            "gemma3, tied",
            "glm",
            "glm4v",
            "glm4v_moe",
            "solar_open",
            "youtu",
            "mimo",
            "qwen2_5_vl",
            "qwen3_vl_moe",
        ),
    ),
    "tensor 2": ("qwen3, tied", "qwen2", "llama", "seed_oss", "qwen3_5_text"),
    "tensor 2 + sequence": (
        "qwen3, tied",
        "mistral",
        *CLASSIC,
        "gemma3_text, tied",
        "deepseek_v32",
        "glm_moe_dsa",
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_vl",
        *VARIANTS,
        *SOFTMAX_EXPERTS,
    ),
    "pipeline 2": (
        "qwen3, tied",
        "qwen2",
        "llama",
        "deepseek_v3",
        "seed_oss",
        "minimax_m2",
        "qwen3_next",
        *OTHER_ATTENTION,
        "qwen3_vl",
        *("gemma, tied", "exaone4", "smollm3", "granite"),
    ),
    "data 2": ("qwen3, tied", "qwen3_moe"),
    "virtual pipeline 2": ("qwen3, tied", "llama", "glm4_moe", "glm4_moe_lite", "gemma3_text, tied"),
    "expert 2": (
        "qwen3_moe",
        "glm4_moe",
        "deepseek_v3",
        "minimax_m2",
        "qwen3_5_moe_text",
        "gpt_oss",
        "glm_moe_dsa",
        "qwen3_vl_moe",
        *SOFTMAX_EXPERTS,
    ),
    "expert 2, tensor 2": (
        "glm4_moe",
        "deepseek_v3",
        "kimi_k2",
        "glm4_moe_lite",
        "minimax_m2",
        "qwen3_next",
        "qwen3_5_moe_text",
        "gpt_oss",
        "deepseek_v32",
    ),
    "tensor 2, whole experts": ("qwen3_moe", "minimax_m2", "gpt_oss"),
    "tensor 2, shared experts": ("qwen3_moe", "deepseek_v3", "qwen3_next"),
    "data 2, shared experts": ("qwen3_moe", "deepseek_v3", "minimax_m2"),
    "pipeline 2, recomputation": ("gemma3_text", "gpt_oss", "glm_moe_dsa"),
}
CASES = [(layout, name) for layout, names in FAMILIES.items() for name in names]
KEPT = {
    *(("one rank", name) for name in FEW),
    *(
        ("tensor 2 + sequence", name)
        for name in ("qwen3, tied", "deepseek_v32", "qwen3_next", "qwen3_vl", "glm4", "stablelm", "olmo2")
    ),
    *(("virtual pipeline 2", name) for name in ("qwen3, tied", "glm4_moe_lite", "gemma3_text, tied")),
    *(("expert 2", name) for name in ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_vl_moe")),
    ("tensor 2, whole experts", "minimax_m2"),
    ("data 2, shared experts", "deepseek_v3"),
    ("pipeline 2, recomputation", "gpt_oss"),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory, request):
    """By family: its checkpoint, and what transformers says of the batch."""
    batch, found = make_batch(vocab=101), {}
    for name in {name for _, name in chosen(request, "layout", "name")}:
        family, _, tied = name.partition(", ")
        folder = make_checkpoint(tmp_path_factory.mktemp(family), family, tied=bool(tied))
        found[name] = (folder, *reference_gradients(folder, batch, temperature=0.8))
    return found


@pytest.fixture(scope="module")
def results(references, request):
    """By layout and family: what every rank says of the batch."""
    batch, jobs = make_batch(vocab=101), {}
    for layout, name in chosen(request, "layout", "name"):
        config = config_for(references[name][0], LAYOUTS[layout], **ACTOR.get(layout, {}))
        jobs[layout, name] = Job(config.actor.parallel.world_size, logprobs_and_gradients, (config, batch))
    return run_jobs(jobs)


@pytest.mark.parametrize(("layout", "name"), shortened(CASES, KEPT))
def test_logprobs_and_gradients_equal_those_of_transformers(references, results, layout: str, name: str):
    _, expected_logps, expected_gradients = references[name]
    check(name, make_batch(vocab=101), results[layout, name], expected_logps, expected_gradients)


@dataclass(frozen=True)
class Form:
    """A form in which a model may be stored."""

    tied: bool
    """If it is not, its config says that it is."""
    stacked: bool

    def write(self, folder: Path, family: str) -> Path:
        make_checkpoint(folder, family, tied=self.tied)
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
        if self.stacked:
            stack_experts(folder)
        return folder


DENSE = (Form(tied=True, stacked=False), Form(tied=False, stacked=False))
FORMS = {
    family: (*DENSE, *(replace(form, stacked=True) for form in DENSE if family in MIXTURES))
    for family in sorted(ALL_FAMILIES.keys() - {"gpt_oss", "kimi_k25"})
} | {"gpt_oss": DENSE}  # always stacked; transformers has no kimi_k25


@pytest.mark.parametrize("family", shortened(FORMS, ("gemma3_text", "mistral3", "qwen3_5_moe")))
def test_a_model_is_what_its_files_hold_in_whatever_form(tmp_path, family: str):
    batch = make_batch(vocab=101)
    folders = {form: form.write(tmp_path / str(number), family) for number, form in enumerate(FORMS[family])}
    work = [(held_port(), config_for(folder, {})) for folder in folders.values()]
    [results] = run_ranks(1, one_after_the_other, work, batch)
    for (form, folder), result in zip(folders.items(), results, strict=True):
        check(f"{family}: {form}", batch, [result], *reference_gradients(folder, batch, temperature=0.8))


def check(
    name: str, batch: TrainBatch, results, expected_logps, expected_gradients, *, tolerance: float = 1e-4
):
    # A micro-batch is known by its target tokens: those of its trajectories, one after the other.
    logp_of = {
        tuple(t.tokens_T[t.loss_mask_T]): logp
        for t, logp in zip(batch.trajectories, expected_logps, strict=True)
    }
    found = {targets: logp for logps, _ in results for targets, logp in logps.items()}
    assert sum(map(len, found)) == sum(map(len, logp_of))
    for targets, logp in found.items():
        rest = targets
        while rest:
            mine = next(known for known in logp_of if rest[: len(known)] == known)
            at = len(targets) - len(rest)
            np.testing.assert_allclose(logp[at : at + len(mine)], logp_of[mine], atol=tolerance, err_msg=name)
            rest = rest[len(mine) :]

    # The bias that decides which experts are chosen is exported too, and so is an indexer: no gradients.
    gradients = {
        name: gradient
        for name, gradient in results[0][1].items()
        if not name.endswith("e_score_correction_bias") and ".indexer." not in name
    }
    assert gradients.keys() == expected_gradients.keys()
    for tensor, expected in expected_gradients.items():
        scale, told = np.abs(expected).max(), f"{name}: {tensor}"
        np.testing.assert_allclose(gradients[tensor] / scale, expected / scale, atol=tolerance, err_msg=told)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_a_single_expert_for_a_token_has_the_weight_that_it_has_in_transformers(family: str, tmp_path):
    folder = make_checkpoint(tmp_path, family, tied=False, num_experts_per_tok=1, norm_topk_prob=True)
    batch = make_batch(vocab=101)
    logps, gradients = reference_gradients(folder, batch, 0.8)
    [(found, ours)] = run_jobs({0: Job(1, logprobs_and_gradients, (config_for(folder, {}), batch))})[0]
    # The weight is the constant 1, so that the gradient of a router is 0, up to rounding in transformers.
    for name in [name for name in gradients if name.endswith("mlp.gate.weight")]:
        assert not ours.pop(name).any() and np.abs(gradients.pop(name)).max() < 1e-6
    check(family, batch, [(found, ours)], logps, gradients)
