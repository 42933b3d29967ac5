"""The same data trains the same model at every layout, and at each of them as plain PyTorch does.

The reference is written without anything of ours but the draw of mini-batches: transformers' model, one
trajectory at a time, decoupled PPO spelled out, torch's AdamW and gradient clipping.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.backend.batch.packing import split_minibatches
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import ParallelConfig, RunConfig
from tests.exported import buckets_of
from tests.integration.test_megatron_parity import config_for, make_batch, unfused
from tests.integration.test_trainer_checkpoint import trainer_of
from tests.models import make_checkpoint, reference_logprobs, reference_model
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

pytestmark = pytest.mark.timeout(600)  # one fixture starts the processes of all layouts

VOCAB = 101
STEPS, SAVED = 5, 3
"""Training steps, and those before the checkpoint."""
MINIBATCHES, TEMPERATURE = 2, 0.8
LR, WARMUP, DECAY, BETAS, EPS, CLIP = 1e-3, 4, 0.1, (0.9, 0.95), 1e-8, 0.1
CLIP_LOW, CLIP_HIGH, WEIGHT_CAP = 0.04, 0.05, 1.5


@dataclass(frozen=True)
class Case:
    parallel: dict[str, Any]
    distributed: bool = False
    model: str = "dense"

    @property
    def ranks(self) -> int:
        return ParallelConfig.model_validate(self.parallel).world_size

    def config(self, models: Path) -> RunConfig:
        return config_for(
            models / self.model,
            self.parallel,
            minibatches=MINIBATCHES,
            objective={"type": "ppo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
            correction={"token": {"type": "cap", "cap": WEIGHT_CAP}},
            optimizer={
                "lr": LR,
                "warmup_steps": WARMUP,
                "weight_decay": DECAY,
                "beta1": BETAS[0],
                "beta2": BETAS[1],
                "eps": EPS,
                "clip_grad": CLIP,
                "distributed": self.distributed,
            },
        )


CASES = {
    "one rank": Case({}),
    "tensor 2": Case({"tensor": 2}),
    "tensor 2 + sequence": Case({"tensor": 2, "sequence": True}),
    "pipeline 2": Case({"pipeline": 2}),
    "virtual pipeline 2": Case({"pipeline": 2, "virtual_pipeline": 2}),
    "data 2": Case({"data": 2}),
    "data 2 distributed": Case({"data": 2}, distributed=True),
    "tensor 2, pipeline 2": Case({"tensor": 2, "pipeline": 2}),
    "experts, one rank": Case({}, model="mixture"),
    "expert 2": Case({"data": 2, "expert": 2}, model="mixture"),
    "expert 2 distributed": Case({"data": 2, "expert": 2}, distributed=True, model="mixture"),
    "expert 2, tensor 2": Case(
        {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}, model="mixture"
    ),
    "tensor 2, whole experts": Case({"tensor": 2, "sequence": True, "expert_tensor": 1}, model="mixture"),
}
RESHARDED = {
    "tensor 2 -> data 2 distributed": ("tensor 2", CASES["data 2 distributed"]),
    "pipeline 2 -> tensor 2": ("pipeline 2", CASES["tensor 2"]),
    "data 2 distributed -> tensor 2, pipeline 2": ("data 2 distributed", CASES["tensor 2, pipeline 2"]),
    "virtual pipeline 2 -> one rank": ("virtual pipeline 2", CASES["one rank"]),
    "expert 2, tensor 2 -> expert 2": ("expert 2, tensor 2", CASES["expert 2"]),
}
"""Where the checkpoint was written, and where it is resumed."""
KEPT = ("one rank", "tensor 2 + sequence", "pipeline 2", "data 2 distributed", "expert 2 distributed")
KEPT_RESHARDED = ("pipeline 2 -> tensor 2",)


@dataclass
class Curve:
    """By step, as far as it has been run; and the weights after the last one, in HF names."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def batch_of(step: int) -> TrainBatch:
    """Rewarded ones are less likely under the behaviour policy: their weights keep the loss away from 0."""
    batch = make_batch(VOCAB, n=8, seed=200 + step, version=step)
    shifted = (
        replace(t, logprobs_T=t.logprobs_T - np.float32(2 * t.reward) * t.loss_mask_T)
        for t in batch.trajectories
    )
    return replace(batch, trajectories=tuple(shifted))


# ---- ours


def train(rank: RankSpec, config: RunConfig, save: Path | None, resume: Path | None) -> Curve:
    """Return losses and norms on the reporting rank, and the weights on rank 0."""
    curve = Curve()
    with trainer_of(rank, config) as trainer:
        if resume is not None:
            trainer.restore(resume)
        while trainer.step < STEPS:
            metrics = trainer.train(batch_of(trainer.step))
            if metrics is not None:
                curve.loss.append(metrics["train/loss"])
                curve.grad_norm.append(metrics["train/grad_norm"])
            if save is not None and trainer.step == SAVED:
                trainer.begin_checkpoint(save)
                trainer.finish_checkpoint()
        for bucket in buckets_of(trainer):
            if bucket is not None:
                curve.weights |= {n: tensor.float().numpy().copy() for n, tensor in bucket.tensors()}
    return curve


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "dense", "qwen3", tied=True)
    make_checkpoint(folder / "mixture", "qwen3_moe", tied=False, num_hidden_layers=2, mlp_only_layers=[0])
    return folder


@pytest.fixture(scope="module")
def trained(models: Path, tmp_path_factory, request) -> dict[str, Curve]:
    resharded = {name: RESHARDED[name] for name in chosen(request, "layouts")}
    folders = {source: tmp_path_factory.mktemp("saved") for source, _ in resharded.values()}
    cases = {name: case for name, case in CASES.items() if name in {*chosen(request, "layout"), *folders}}
    jobs = {
        name: Job(case.ranks, train, (case.config(models), folders.get(name), None))
        for name, case in cases.items()
    } | {
        name: Job(case.ranks, train, (case.config(models), None, folders[source]))
        for name, (source, case) in resharded.items()
    }
    four = {name: job for name, job in jobs.items() if job.ranks == 4}
    # Every checkpoint is written by two ranks, and read behind that.
    curves_by_name = run_jobs({name: job for name, job in jobs.items() if name not in four})
    if four:
        curves_by_name |= run_jobs(four)
    trained = {}
    for name, curves in curves_by_name.items():
        [reported] = [curve for curve in curves if curve.loss]
        trained[name] = replace(reported, weights=curves[0].weights)
    return trained


# ---- plain PyTorch


@dataclass
class Reference:
    curve: Curve
    before: dict[str, np.ndarray]
    """The weights at the start."""
    clipped: int = 0
    capped: int = 0
    """Tokens whose ratio was clipped, and those whose weight was capped."""
    norms: list[float] = field(default_factory=list)
    """Of the gradients of all mini-batches."""


def plain_training(folder: Path, seed: int) -> Reference:
    model = reference_model(folder)
    before = weights_of(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=BETAS,
        eps=EPS,
    )
    found = Reference(Curve(), before)
    for step in range(STEPS):
        batch = batch_of(step)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP)
        with torch.no_grad():
            proximal = [logprobs(model, trajectory) for trajectory in batch.trajectories]
        advantages = normalized_by_pair([trajectory.reward for trajectory in batch.trajectories])
        loss, norms, tokens = 0.0, [], sum(len(logp) for logp in proximal)
        draw = np.random.default_rng((seed, step))
        for minibatch in split_minibatches(batch.episode_N, MINIBATCHES, draw):
            optimizer.zero_grad()
            in_minibatch = sum(len(proximal[i]) for i in minibatch)
            for i in minibatch:
                trajectory, a = batch.trajectories[i], advantages[i]
                behaviour = torch.from_numpy(trajectory.logprobs_T[trajectory.loss_mask_T])
                raw = (proximal[i] - behaviour).exp()
                ratio = (logprobs(model, trajectory) - proximal[i]).exp()
                surrogate = torch.min(ratio * a, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * a)
                total = -(raw.clamp(max=WEIGHT_CAP) * surrogate).sum()
                (total / in_minibatch).backward()
                loss += total.item()
                found.clipped += int((surrogate < ratio * a).sum())
                found.capped += int((raw > WEIGHT_CAP).sum())
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
        found.curve.loss.append(loss / tokens)
        found.curve.grad_norm.append(sum(norms) / len(norms))
        found.norms += norms
    found.curve.weights = weights_of(model)
    return found


def logprobs(model: torch.nn.Module, trajectory: Any) -> torch.Tensor:
    """Of the tokens that carry loss."""
    return reference_logprobs(model, trajectory.tokens_T, TEMPERATURE)[trajectory.loss_mask_T[1:]]


def normalized_by_pair(rewards: list[float]) -> list[float]:
    pairs = np.array(rewards).reshape(-1, 2)
    deviation = pairs.std(1, ddof=1, keepdims=True)
    return ((pairs - pairs.mean(1, keepdims=True)) / (deviation + 1e-6)).flatten().tolist()


def weights_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return dict(unfused((name, p.detach().numpy().copy()) for name, p in model.named_parameters()))


@pytest.fixture(scope="module")
def references(models: Path) -> dict[str, Reference]:
    return {
        name: plain_training(models / name, Case({}, model=name).config(models).run.seed)
        for name in ("dense", "mixture")
    }


# ---- and both


def check(curve: Curve, reference: Reference) -> None:
    """The reference's last steps, as many as the curve has, and the weights after them."""
    expected, steps = reference.curve, len(curve.loss)
    np.testing.assert_allclose(curve.loss, expected.loss[-steps:], rtol=1e-4)
    np.testing.assert_allclose(curve.grad_norm, expected.grad_norm[-steps:], rtol=1e-4)
    assert curve.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        update = np.linalg.norm(value - reference.before[name])
        assert np.linalg.norm(curve.weights[name] - value) < 1e-3 * update, name


@pytest.mark.parametrize("layout", shortened(CASES, KEPT))
def test_five_steps_are_those_of_plain_pytorch(layout: str, trained, references):
    assert len(trained[layout].loss) == STEPS
    check(trained[layout], references[CASES[layout].model])


@pytest.mark.parametrize("layouts", shortened(RESHARDED, KEPT_RESHARDED))
def test_a_run_goes_on_at_another_layout_as_if_nothing_had_been(layouts: str, trained, references):
    assert len(trained[layouts].loss) == STEPS - SAVED
    check(trained[layouts], references[RESHARDED[layouts][1].model])


def test_every_bound_of_the_objective_and_the_optimizer_acts(references):
    for reference in references.values():
        assert reference.clipped > 0 and reference.capped > 0
        assert min(reference.norms) > CLIP
