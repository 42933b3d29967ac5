"""Fixed-seed training steps to the last bit, for changes that must not alter numerics.

    python -m tests.numerics > before.json                # on the commit before, on this machine
    python -m tests.numerics --against before.json        # on the commit behind; exit code 1 if a bit differs

Prints the loss and the gradient norm of five steps at four layouts, and a hash of the weights after the last
one, as one JSON object. Libraries of other machines may round differently: compare on one machine only.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig
from tests.exported import buckets_of
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.models import make_checkpoint
from tests.ranks import Job, run_jobs

STEPS = 5
VOCAB = 101
LAYOUTS = {
    "one rank": ("dense", {}, False),
    "tensor 2, pipeline 2": ("dense", {"tensor": 2, "pipeline": 2}, False),
    "data 2 distributed": ("dense", {"data": 2}, True),
    "expert 2, tensor 2": (
        "mixture",
        {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
        False,
    ),
}
"""By name: the model, the layout and whether the optimizer is distributed."""


def config_of(folder: Path, layout: dict[str, int | bool], distributed: bool) -> RunConfig:
    """Decoupled PPO with a capped importance weight, clipping, warm-up and weight decay."""
    return config_for(
        folder,
        layout,
        minibatches=2,
        objective={"type": "ppo", "clip_low": 0.04, "clip_high": 0.05},
        correction={"token": {"type": "cap", "cap": 1.5}},
        optimizer={
            "lr": 1e-3,
            "warmup_steps": 4,
            "weight_decay": 0.1,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "clip_grad": 0.5,
            "distributed": distributed,
        },
    )


def batch_of(step: int) -> TrainBatch:
    """Return twelve trajectories. Rewards go with less likely tokens, so that losses are not 0."""
    batch = make_batch(VOCAB, n=12, seed=200 + step, version=step)
    shifted = (
        replace(t, logprobs_T=t.logprobs_T - np.float32(2 * t.reward) * t.loss_mask_T)
        for t in batch.trajectories
    )
    return replace(batch, trajectories=tuple(shifted))


def train(rank: RankSpec, config: RunConfig) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Return losses and gradient norms, on the reporting rank, and the weights in HF names, on rank 0."""
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(STEPS):
        metrics = trainer.train(batch_of(step))
        if metrics is not None:
            losses.append(metrics["train/loss"])
            norms.append(metrics["train/grad_norm"])
    weights = {
        name: tensor.float().numpy().copy()
        for bucket in buckets_of(trainer)
        if bucket is not None
        for name, tensor in bucket.tensors()
    }
    return losses, norms, weights


def curves(models: Path) -> dict[str, object]:
    """Train at every layout; floats in hexadecimal."""
    jobs: dict[str, Job] = {}
    for name, (model, layout, distributed) in LAYOUTS.items():
        config = config_of(models / model, layout, distributed)
        jobs[name] = Job(config.actor.parallel.world_size, train, (config,))
    measured: dict[str, object] = {}
    for (
        name,
        job,
    ) in jobs.items():  # jobs of two and of four ranks cannot share processes
        by_rank = run_jobs({name: job})[name]
        [(losses, norms)] = [(losses, norms) for losses, norms, _ in by_rank if losses]
        digest = hashlib.sha256()
        for _, _, weights in by_rank:
            for key in sorted(weights):
                digest.update(key.encode() + weights[key].tobytes())
        measured[name] = {
            "loss": [loss.hex() for loss in losses],
            "grad_norm": [norm.hex() for norm in norms],
            "weights": digest.hexdigest(),
        }
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.numerics")
    parser.add_argument("--against", type=Path, help="what an earlier call has printed")
    against = parser.parse_args().against
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        make_checkpoint(models / "dense", "qwen3", tied=True)
        make_checkpoint(models / "mixture", "qwen3_moe", tied=False)
        measured = curves(models)
    print(json.dumps(measured, indent=2))
    if against is not None:
        before = json.loads(against.read_text())
        differing = [name for name in LAYOUTS if measured[name] != before[name]]
        print(f"differing layouts: {', '.join(differing) or 'none'}", file=sys.stderr)
        sys.exit(bool(differing))


if __name__ == "__main__":
    main()
