"""Log-probs of a model in a Hugging Face folder: the trainer's, in a layout, against those of transformers.

    python -m tests.log_probs MODEL                            one rank
    python -m tests.log_probs MODEL '{tensor: 2, sequence: true}'

Both sides compute in float32 on the CPU, on random ids, and on text if the folder has a tokenizer.
Prints one JSON object: `parameters`, `tokens`, `largest_difference`. Exit code 1 if that is 1e-4 or more.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import yaml

from slipstream.backend.batch.micro_batch import assemble
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec, initialize
from slipstream.bridge.families import model_spec
from slipstream.configs.schema import ActorConfig
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.models import reference_logprobs, reference_model
from tests.ranks import Job, run_jobs

ALLOWED = 1e-4
LENGTHS = (7, 64, 200)
TEXT = (
    "A policy version is a name, never used twice. Its parent is the version from which its update started."
)


def sequences(model: Path) -> list[np.ndarray]:
    """Return sequences of token ids."""
    vocab = model_spec(model).geometry.vocab
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, vocab, length) for length in LENGTHS]
    if (model / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        ids.append(np.array(AutoTokenizer.from_pretrained(model).encode(TEXT)))
    return ids


def as_trajectory(tokens_T: np.ndarray) -> Trajectory:
    """Return a trajectory of which every token but the first was sampled."""
    sampled_T = np.arange(len(tokens_T)) > 0
    return Trajectory(
        tokens_T.astype(np.int64),
        sampled_T,
        np.zeros(len(tokens_T), np.float32),
        np.where(sampled_T, 0, UNSAMPLED).astype(np.int32),
        Finish.STOP,
        reward=0.0,
    )


def of_the_trainer(rank: RankSpec, model: Path, parallel: dict[str, object]) -> np.ndarray | None:
    """Return the log-probs of all sequences, one behind the other; None except on the last stage."""
    actor = ActorConfig.model_validate({"parallel": parallel})
    device = initialize(rank, actor.parallel, seed=0, timeout_s=600)
    from slipstream.backend.megatron.frozen import FrozenModel

    frozen = FrozenModel(model_spec(model), actor, torch.float32, device)
    trajectories = tuple(map(as_trajectory, sequences(model)))
    batch = TrainBatch(0, trajectories, np.arange(len(trajectories)))
    micro = assemble(batch, tuple(range(len(trajectories))), multiple=actor.parallel.tensor)
    [logprobs_M] = frozen.log_probs([micro], temperature=1.0)
    return None if logprobs_M is None else logprobs_M.cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("parallel", nargs="?", default="{}", help="the recipe's actor.parallel, as YAML")
    arguments = parser.parse_args()
    parallel = yaml.safe_load(arguments.parallel)
    ranks = ActorConfig.model_validate({"parallel": parallel}).parallel.world_size
    job = Job(ranks, of_the_trainer, (arguments.model, parallel))
    results = run_jobs({"trainer": job}, timeout_s=1800)["trainer"]
    trainer = next(result for result in results if result is not None)
    reference = reference_model(arguments.model)
    with torch.no_grad():
        expected = np.concatenate(
            [reference_logprobs(reference, ids).numpy() for ids in sequences(arguments.model)]
        )
    difference = float(np.abs(trainer - expected).max())
    print(
        json.dumps(
            {
                "parameters": sum(parameter.numel() for parameter in reference.parameters()),
                "tokens": len(expected),
                "largest_difference": difference,
            }
        )
    )
    sys.exit(difference >= ALLOWED)


if __name__ == "__main__":
    main()
