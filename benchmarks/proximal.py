"""Ways to proximal log-probs: the cost of a step, and the error of the interpolated ones.

    python -m benchmarks.proximal          # five minutes, 4 GB

Time: the same training step with `actor.recompute_logprobs`, with a forward pass for the first mini-batch as
well, which the trainer does without, and with `actor.interpolate_logprobs`. They take turns in separate
processes.

Error: the quickstart's policy is trained on its own completions, each sampled from a snapshot that is up to
4 versions old. In every mini-batch the estimate, which lies between behaviour and current log-probs, is
compared with the log-probs that were recomputed at the start of the step. The first mini-batch uses the
weights that the step starts from; the others use updated weights.
"""

import json
import random
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from benchmarks.harness import RANK_THREADS, parser
from benchmarks.train_step import (
    SHAPES,
    WARM_UP,
    Ours,
    Shape,
    Side,
    compare,
    config_of,
    lone_rank,
    median_of,
    work,
)
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.backend.objective.correction import interpolated_logp
from slipstream.backend.objective.losses import Tokens
from slipstream.backend.objective.policy_loss import PolicyLoss
from slipstream.backend.quickstart import WARM_START_STEPS, task, write_policy
from slipstream.backend.quickstart.policy import MAX_RESPONSE_TOKENS
from slipstream.backend.quickstart.tokenizer import EOS, IDS, prompt_text
from slipstream.configs.schema import ActorConfig, RunConfig
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory

SAMPLES = 8
"""Completions of each prompt."""
LAGS = {0: 4, 1: 6, 2: 4, 3: 1, 4: 1}
"""Number of prompts of a step by the lag of their completions: 1.3 on average, as in the quickstart."""


# ---- time


class PassForEach(Ours):
    """The trainer with a forward pass for the proximal log-probs of every mini-batch, also of the first."""

    def __init__(self, config: RunConfig, first: TrainBatch) -> None:
        super().__init__(config, first)
        from slipstream.backend.trainer import rank

        # The process has no other trainer.
        rank.first_recomputed = lambda actor, hooks: 0


RECOMPUTED = {"recompute_logprobs": True, "interpolate_logprobs": False}
SIDES: dict[str, tuple[type[Ours], dict[str, bool]]] = {
    "recomputed": (Ours, RECOMPUTED),
    "pass_for_each": (PassForEach, RECOMPUTED),
    "interpolated": (Ours, {"recompute_logprobs": False, "interpolate_logprobs": True}),
}
TIMED = {
    **SHAPES,
    "quickstart, 1 mini-batch": replace(SHAPES["quickstart"], minibatches=1),
    "middle, 1 mini-batch": replace(SHAPES["middle"], minibatches=1),
}
"""The shapes, and the same with a single update per step, which is the default."""


def times(shape: Shape, steps: int, threads: int) -> dict[str, float]:
    """Compare the time of a step with each of ``SIDES``. Ratios are over the recomputed ones."""
    with work(shape, steps + WARM_UP) as (folder, batches):
        sides: dict[str, Side] = {
            name: (trainer, config_of(folder, shape.settings | actor))
            for name, (trainer, actor) in SIDES.items()
        }
        _, turns = compare(sides, batches, threads)
    seconds = {name: median_of(taken, "seconds") for name, taken in turns.items()}
    cpu = {name: median_of(taken, "cpu_seconds") for name, taken in turns.items()}
    figures = {f"{name}_s": round(value, 4) for name, value in seconds.items()}
    for name in ("pass_for_each", "interpolated"):
        figures[f"{name}_time_ratio"] = round(seconds[name] / seconds["recomputed"], 3)
        figures[f"{name}_cpu_ratio"] = round(cpu[name] / cpu["recomputed"], 3)
    figures["largest_difference_of_losses"] = max(
        abs(mine.result.loss - theirs.result.loss)
        for mine, theirs in zip(turns["recomputed"], turns["pass_for_each"], strict=True)
    )
    return figures


# ---- error


@dataclass
class Errors:
    """Errors of single tokens."""

    by_lag: dict[int, list[Tensor]] = field(default_factory=dict)
    """|estimate - recomputed| by lag."""
    gaps: list[Tensor] = field(default_factory=list)
    """|behaviour - recomputed|: the error without interpolation."""

    def add(self, tokens: Tokens) -> None:
        assert tokens.proximal_logp_M is not None
        estimate_M = interpolated_logp(tokens.logp_M.detach(), tokens.behaviour_logp_M, tokens.lag_M)
        error_M = (estimate_M - tokens.proximal_logp_M).abs()
        for lag in tokens.lag_M.unique().tolist():
            self.by_lag.setdefault(lag, []).append(error_M[tokens.lag_M == lag])
        self.gaps.append((tokens.behaviour_logp_M - tokens.proximal_logp_M).abs())

    def summary(self) -> dict[str, float]:
        error_M, gap_M = torch.cat([torch.cat(parts) for parts in self.by_lag.values()]), torch.cat(self.gaps)
        return {
            "tokens": len(error_M),
            "error_mean": error_M.mean().item(),
            "error_p99": error_M.quantile(0.99).item(),
            "error_max": error_M.max().item(),
            "behaviour_gap_mean": gap_M.mean().item(),
            "behaviour_gap_max": gap_M.max().item(),
        }

    def mean_by_lag(self) -> dict[int, float]:
        return {lag: torch.cat(parts).mean().item() for lag, parts in sorted(self.by_lag.items())}


@contextmanager
def watched(errors: Errors) -> Iterator[None]:
    """Record the errors of all tokens whose loss the trainer computes."""
    from slipstream.backend.trainer import policy_update as trainer

    token_losses = trainer.token_losses

    def look(actor: ActorConfig, tokens: Tokens) -> PolicyLoss:
        errors.add(tokens)
        return token_losses(actor, tokens)

    with patch.object(trainer, "token_losses", look):
        yield


@torch.no_grad()
def sampled(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[task.Problem],
    version: int,
) -> list[Trajectory]:
    """Return SAMPLES trajectories for each problem, sampled at temperature 1."""
    asked = [problem for problem in problems for _ in range(SAMPLES)]
    texts = [prompt_text(problem.prompt) for problem in asked]
    prompts = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    # transformers types `self` of `generate` with attributes that no model declares.
    tokens_BT = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        **prompts, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_RESPONSE_TOKENS
    )
    trajectories, width = [], prompts["input_ids"].shape[1]
    for problem, text, row in zip(asked, texts, tokens_BT[:, width:].tolist(), strict=True):
        prompt = tokenizer(text)["input_ids"]
        stopped = IDS[EOS] in row
        response = row[: row.index(IDS[EOS]) + 1] if stopped else row
        tokens_T = torch.tensor([*prompt, *response])
        logp_T = model(tokens_T[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens_T[1:, None])[:, 0]
        mask_T = np.arange(len(tokens_T)) >= len(prompt)
        right = stopped and task.is_correct(str(tokenizer.decode(response[:-1])), problem.label)
        trajectories.append(
            Trajectory(
                tokens_T.numpy(),
                mask_T,
                np.where(mask_T, np.concatenate([[0.0], logp_T.numpy()]), 0).astype(np.float32),
                np.where(mask_T, version, UNSAMPLED).astype(np.int32),
                Finish.STOP if stopped else Finish.LENGTH,
                reward=float(right),
            )
        )
    return trajectories


def measure_errors(steps: int, lr: float, made: Path | None) -> Errors:
    """Train ``steps`` steps, after as many as the oldest completions need. ``made``: an existing policy."""
    errors, oldest = Errors(), max(LAGS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = made or Path(scratch) / "policy"
        if made is None:
            write_policy(folder, 0, steps=WARM_START_STEPS, say=lambda _: None)
        trainer = lone_rank(config_of(folder, SHAPES["quickstart"].settings | {"optimizer": {"lr": lr}}))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        problems = task.train_problems(random.Random(0))
        snapshots: deque[Path] = deque(maxlen=oldest + 1)  # the newest last
        for step in range(oldest + steps):
            snapshots.append(Path(scratch) / str(step))
            trainer.export_hf(snapshots[-1])
            trajectories = []
            for lag, prompts in LAGS.items():
                lag = min(lag, step)
                model = Qwen3ForCausalLM.from_pretrained(snapshots[-1 - lag], dtype=torch.float32)
                trajectories += sampled(model, tokenizer, list(islice(problems, prompts)), step - lag)
            batch = TrainBatch(step, tuple(trajectories), np.arange(len(trajectories)) // SAMPLES)
            with watched(errors if step >= oldest else Errors()):
                trainer.train(batch)
    return errors


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--threads", type=int, default=RANK_THREADS)
    options.add_argument("--lr", type=float, default=2.5e-4, help="the quickstart's")
    options.add_argument("--policy", type=Path, help="the quickstart's, if it exists")
    options.add_argument("--shapes", nargs="*", choices=TIMED, default=list(TIMED))
    arguments = options.parse_args()
    shapes = {name: times(TIMED[name], arguments.steps, arguments.threads) for name in arguments.shapes}
    columns: Columns[str] = {
        "": str,
        "recomputed s": lambda name: f"{shapes[name]['recomputed_s']:.3f}",
        "pass for each": lambda name: f"{shapes[name]['pass_for_each_time_ratio']:.2f}",
        "of CPU": lambda name: f"{shapes[name]['pass_for_each_cpu_ratio']:.2f}",
        "interpolated": lambda name: f"{shapes[name]['interpolated_time_ratio']:.2f}",
        "of CPU ": lambda name: f"{shapes[name]['interpolated_cpu_ratio']:.2f}",
    }
    torch.set_num_threads(arguments.threads)
    errors = measure_errors(arguments.steps, arguments.lr, arguments.policy)
    by_lag = errors.mean_by_lag()
    console = table_console()
    console.print(rows_table("a training step", shapes, columns))
    lags: Columns[int] = {"lag": str, "mean error of log-probs": lambda lag: f"{by_lag[lag]:.1e}"}
    console.print(rows_table("error of the estimate", by_lag, lags))
    document = {"error_mean_by_lag": by_lag, "shapes": shapes, "threads": arguments.threads}
    print(json.dumps({**errors.summary(), **document}))


if __name__ == "__main__":
    main()
