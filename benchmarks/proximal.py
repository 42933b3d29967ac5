"""Interpolated against recomputed proximal log-probs: what a step costs, and how far the estimate is off.

    python -m benchmarks.proximal          # four minutes, 3 GB

Time: the same training step of the trainer with `actor.recompute_logprobs` and with
`actor.interpolate_logprobs`, taking turns in processes of their own.

Error: the quickstart's policy is trained on its own answers, each sampled from a snapshot of it that is up to
4 versions old. In every minibatch the estimate between behaviour and current log-probs is compared with the
log-probs that were recomputed at the start of the step. The first minibatch is taken with the very weights
that the step starts from; the others have moved on.
"""

import argparse
import json
import random
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.train_step import SHAPES, WARM_UP, Ours, config_of, median_of, take_turns, work
from slipstream.backend.batch.micro_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.objective.correction import interpolated_logp
from slipstream.backend.objective.losses import Tokens
from slipstream.backend.quickstart import WARM_START_STEPS, task, write_policy
from slipstream.backend.quickstart.policy import MAX_RESPONSE_TOKENS
from slipstream.backend.quickstart.tokenizer import prompt_text
from slipstream.rollout.network import free_port
from slipstream.rollout.trajectory import UNSAMPLED, Finish, Trajectory

PROMPTS, ANSWERS = 16, 8
LAGS = {0: 4, 1: 6, 2: 4, 3: 1, 4: 1}
"""How many of the prompts of a step are answered by the policy of so many versions ago: 1.3 on average, as in
the quickstart."""
SETTINGS = {
    "recomputed": {"recompute_logprobs": True, "interpolate_logprobs": False},
    "interpolated": {"recompute_logprobs": False, "interpolate_logprobs": True},
}


# ---- time


def times(shape: str, steps: int, threads: int) -> dict[str, float]:
    with work(SHAPES[shape], steps + WARM_UP) as (folder, batches):
        sides: dict[str, Any] = {
            name: (Ours, config_of(folder, **SHAPES[shape].settings, **actor))
            for name, actor in SETTINGS.items()
        }
        _, turns = take_turns(sides, batches, threads)
    found = {f"{name}_s": round(median_of(of_side, "seconds"), 4) for name, of_side in turns.items()}
    ratio = found["interpolated_s"] / found["recomputed_s"]
    cpu = {name: median_of(of_side, "cpu_seconds") for name, of_side in turns.items()}
    return found | {
        "time_ratio": round(ratio, 3),
        "cpu_ratio": round(cpu["interpolated"] / cpu["recomputed"], 3),
    }


# ---- error


@dataclass
class Errors:
    """Of single tokens, by their lag: |estimate - recomputed|."""

    by_lag: dict[int, list[Tensor]] = field(default_factory=dict)
    gaps: list[Tensor] = field(default_factory=list)
    """|behaviour - recomputed|: what the estimate would be off without interpolation."""

    def add(self, tokens: Tokens) -> None:
        assert tokens.proximal_logp_M is not None
        estimate_M = interpolated_logp(tokens.logp_M.detach(), tokens.behaviour_logp_M, tokens.lag_M)
        error_M = (estimate_M - tokens.proximal_logp_M).abs()
        for lag in tokens.lag_M.unique().tolist():
            self.by_lag.setdefault(lag, []).append(error_M[tokens.lag_M == lag])
        self.gaps.append((tokens.behaviour_logp_M - tokens.proximal_logp_M).abs())

    def summary(self) -> dict[str, Any]:
        everything, gap = (
            torch.cat([torch.cat(parts) for parts in self.by_lag.values()]),
            torch.cat(self.gaps),
        )
        return {
            "tokens": len(everything),
            "error_mean": everything.mean().item(),
            "error_p99": everything.quantile(0.99).item(),
            "error_max": everything.max().item(),
            "behaviour_gap_mean": gap.mean().item(),
            "behaviour_gap_max": gap.max().item(),
            "error_mean_by_lag": {
                lag: torch.cat(parts).mean().item() for lag, parts in sorted(self.by_lag.items())
            },
        }


@contextmanager
def watched(errors: Errors) -> Iterator[None]:
    """Every token that the trainer takes the loss of is looked at."""
    from slipstream.backend.trainer import rank as trainer

    token_losses = trainer.token_losses

    def look(actor: Any, tokens: Tokens) -> Any:
        errors.add(tokens)
        return token_losses(actor, tokens)

    with patch.object(trainer, "token_losses", look):
        yield


@torch.no_grad()
def answers(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[task.Problem],
    version: int,
) -> list[Trajectory]:
    """ANSWERS to each problem, sampled at temperature 1."""
    asked = [problem for problem in problems for _ in range(ANSWERS)]
    texts = [prompt_text(problem.prompt) for problem in asked]
    prompts = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    tokens_BT = model.generate(
        **prompts, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_RESPONSE_TOKENS
    )
    found, width = [], prompts["input_ids"].shape[1]
    for problem, text, row in zip(asked, texts, tokens_BT[:, width:].tolist(), strict=True):
        prompt = tokenizer(text)["input_ids"]
        end = tokenizer.eos_token_id
        stopped = end in row
        response = row[: row.index(end) + 1] if stopped else row
        tokens_T = torch.tensor([*prompt, *response])
        logp_T = model(tokens_T[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens_T[1:, None])[:, 0]
        sampled = np.arange(len(tokens_T)) >= len(prompt)
        right = stopped and task.is_correct(tokenizer.decode(response[:-1]), problem.label)
        found.append(
            Trajectory(
                tokens_T.numpy(),
                sampled,
                np.where(sampled, np.concatenate([[0.0], logp_T.numpy()]), 0).astype(np.float32),
                np.where(sampled, version, UNSAMPLED).astype(np.int32),
                Finish.STOP if stopped else Finish.LENGTH,
                reward=float(right),
            )
        )
    return found


def error(steps: int, lr: float, made: Path | None) -> dict[str, Any]:
    """Errors over ``steps`` steps, after as many as the oldest answers need. ``made``: the policy."""
    from slipstream.backend.trainer.rank import TrainerRank

    errors, oldest = Errors(), max(LAGS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = made or Path(scratch) / "policy"
        if made is None:
            write_policy(folder, 0, steps=WARM_START_STEPS, say=lambda _: None)
        config = config_of(folder, **SHAPES["quickstart"].settings, optimizer={"lr": lr})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        host = "127.0.0.1"
        trainer = TrainerRank(config, RankSpec(0, 1, host, free_port(host)))
        problems = task.train_problems(random.Random(0))
        snapshots: deque[Path] = deque(maxlen=oldest + 1)  # the newest last
        for step in range(oldest + steps):
            snapshots.append(Path(scratch) / str(step))
            trainer.export_hf(snapshots[-1])
            trajectories = []
            for lag, prompts in LAGS.items():
                lag = min(lag, step)
                model = AutoModelForCausalLM.from_pretrained(snapshots[-1 - lag], dtype=torch.float32)
                trajectories += answers(model, tokenizer, list(islice(problems, prompts)), step - lag)
            batch = TrainBatch(step, tuple(trajectories), np.arange(len(trajectories)) // ANSWERS)
            with watched(errors if step >= oldest else Errors()):
                trainer.train(batch)
    return errors.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--lr", type=float, default=2.5e-4, help="the quickstart's")
    parser.add_argument("--policy", type=Path, help="the quickstart's, if it is there already")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    arguments = parser.parse_args()
    console = Console()
    table = Table("", "recomputed s", "interpolated s", "ratio", "of CPU")
    shapes = {name: times(name, arguments.steps, arguments.threads) for name in arguments.shapes}
    for name, row in shapes.items():
        table.add_row(
            name,
            f"{row['recomputed_s']:.3f}",
            f"{row['interpolated_s']:.3f}",
            f"{row['time_ratio']:.2f}",
            f"{row['cpu_ratio']:.2f}",
        )
    torch.set_num_threads(arguments.threads)
    found = error(arguments.steps, arguments.lr, arguments.policy)
    console.print(table)
    by_lag = Table("lag", "mean error of log-probs")
    for lag, mean in found["error_mean_by_lag"].items():
        by_lag.add_row(str(lag), f"{mean:.1e}")
    console.print(by_lag)
    print(json.dumps(found | {"shapes": shapes, "threads": arguments.threads}))


if __name__ == "__main__":
    main()
