"""Shared prefixes computed once, against plain packing: FLOPs, time of a training step, and errors.

    python -m benchmarks.prefixes

*traces*: episodes of agents with drawn lengths, whose turns become trajectories as they do in a run. Groups
of samples share system prompt and task. Some agents forget their earlier reasoning, so that every turn begins
a branch; some send sub-agents ahead with their history; some compact it. *groups*: samples of prompts as long
as completions.

A step has one mini-batch. FLOPs count the LM head for every token, as all FLOPs of the project do.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.harness import RANK_THREADS, Turn, parser, take_turns
from benchmarks.train_step import config_of, lone_rank
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.configs.schema import RunConfig
from slipstream.rollout.gateway.endpoint.trajectories import SampledTurn, trajectories_of
from slipstream.rollout.tokens.trajectory import Finish, Trajectory
from slipstream.rollout.tokens.turn_entries import TurnType

VOCAB = 4096
SYSTEM, TASK, REASONING, ACTION, OUTPUT = 300, 150, 70, 30, 70
"""Tokens of the system prompt and the task, and means of those of a turn's reasoning, action and output."""
TURNS = 8
SAMPLES = 2
GOALS = {"traces_flops": 1 / 3, "traces_time": 0.5, "groups_flops": 0.65, "largest_error": 1e-6}


def policy() -> Qwen3ForCausalLM:
    """Return a small policy with random weights."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    )


# ---- what is trained


class Conversation:
    """The turns of one episode, by number."""

    def __init__(self, rng: np.random.Generator, prompt: np.ndarray) -> None:
        self._rng, self._prompt = rng, prompt
        self.turns: dict[int, SampledTurn] = {}
        self._prompts: dict[int, int] = {}
        """Length of each turn's prompt."""

    def _text(self, mean: int) -> np.ndarray:
        n = max(4, int(self._rng.lognormal(np.log(mean), 0.4)))
        return self._rng.integers(0, VOCAB, n).astype(np.int32)

    def turn(self, parent: int | None, *, forgets: bool = False, kept: int | None = None) -> int:
        """Add a turn and return its number.

        forgets: its prompt has no reasoning of the turn before. kept: its prompt repeats so many tokens of
        that turn's, and goes on with a summary of the rest.
        """
        number = len(self.turns) + 1
        if parent is None:
            shared, context = 0, self._prompt
        elif kept is not None:
            shared, context = kept, self._text(2 * OUTPUT)
        elif forgets:
            action = self.turns[parent].tokens[-ACTION:]
            shared, context = self._prompts[parent], np.concatenate([action, self._text(OUTPUT)])
        else:
            shared = self._prompts[parent] + len(self.turns[parent].tokens)
            context = self._text(OUTPUT)
        tokens = np.concatenate([self._text(REASONING), self._text(ACTION)])
        self._prompts[number] = shared + len(context)
        self.turns[number] = SampledTurn(
            number,
            parent,
            shared,
            context,
            tokens,
            -self._rng.exponential(1.0, len(tokens)).astype(np.float32),
            [(0, len(tokens))],
            Finish.STOP,
            TurnType.MAIN,
            False,
            "",
        )
        return number


def forgetful(episode: Conversation) -> None:
    """Every turn begins a branch without the reasoning before it."""
    last = episode.turn(None)
    for _ in range(TURNS - 1):
        last = episode.turn(last, forgets=True)


def sending(episode: Conversation) -> None:
    """Sub-agents take the history with them, three from every second turn."""
    last = episode.turn(None)
    for number in range(TURNS // 2):
        helpers = [episode.turn(last) for _ in range(1 + 3 * (number % 2))]
        last = episode.turn(helpers[-1])


def compacting(episode: Conversation) -> None:
    """A forgetful agent that replaces its history by a summary, after half of its turns."""
    last = episode.turn(None)
    for number in range(1, TURNS):
        kept = SYSTEM + TASK if number == TURNS // 2 else None
        last = episode.turn(last, forgets=kept is None, kept=kept)


AGENTS: Sequence[Callable[[Conversation], None]] = (forgetful, sending, compacting)


def traces(rng: np.random.Generator, version: int) -> TrainBatch:
    """Return ``SAMPLES`` episodes of a task for each kind of agent."""
    system = rng.integers(0, VOCAB, SYSTEM).astype(np.int32)
    episodes: list[list[Trajectory]] = []
    for agent in AGENTS:
        prompt = np.concatenate([system, rng.integers(0, VOCAB, TASK).astype(np.int32)])
        for _ in range(SAMPLES):
            episode = Conversation(rng, prompt)
            agent(episode)
            episodes.append(trajectories_of(episode.turns))
    return _batch(episodes, version, rng)


def groups(rng: np.random.Generator, version: int) -> TrainBatch:
    """Return three groups of eight samples with prompts as long as completions."""
    episodes: list[list[Trajectory]] = []
    for _ in range(3):
        prompt = rng.integers(0, VOCAB, 4 * REASONING).astype(np.int32)
        for _ in range(8):
            n = int(np.clip(rng.lognormal(np.log(4 * REASONING), 0.3), 40, 1000))
            tokens = rng.integers(0, VOCAB, n).astype(np.int32)
            logprobs = -rng.exponential(1.0, n).astype(np.float32)
            turn = SampledTurn(
                1, None, 0, prompt, tokens, logprobs, [(0, n)], Finish.STOP, TurnType.MAIN, False, ""
            )
            episodes.append(trajectories_of({1: turn}))
    return _batch(episodes, version, rng, samples=8)


def _batch(
    episodes: Sequence[Sequence[Trajectory]], version: int, rng: np.random.Generator, samples: int = SAMPLES
) -> TrainBatch:
    trajectories: list[Trajectory] = []
    for parts in episodes:
        reward = float(rng.random())
        for part in parts:
            part.versions_T[part.loss_mask_T] = version
            trajectories.append(replace(part, reward=reward))
    counts = [len(parts) for parts in episodes]
    return TrainBatch(
        version,
        tuple(trajectories),
        np.repeat(np.arange(len(episodes)) // samples, counts),
        siblings_N=np.repeat(np.arange(len(episodes)), counts),
    )


# ---- the two sides


class Learned(NamedTuple):
    """A step of one side: FLOPs, and the log-probs before it by trajectory."""

    tflop: float
    logps: list[np.ndarray]


def side(config: RunConfig, batches: Sequence[TrainBatch]) -> tuple[str, Callable[[int], Learned]]:
    """Set up one side for ``take_turns``: a trainer of one rank."""
    trainer: Any = lone_rank(config)
    logps: list[np.ndarray] = []

    def step(number: int) -> Learned:
        batch = batches[number]
        if number == 0:  # the weights are still the same on both sides
            [microbatches], _ = trainer.microbatches(batch)
            logps.extend([np.empty(0)] * len(batch.trajectories))
            for micro, logp_M in zip(microbatches, trainer._policy.log_probs(microbatches, 1.0), strict=True):
                for place in micro.pack:
                    logps[place] = logp_M.numpy()[micro.trajectory_M == place]
        metrics = trainer.train(batch)
        return Learned(metrics["train/tflop"], logps if number == 0 else [])

    return f"share_prefixes: {config.actor.share_prefixes}", step


@dataclass(frozen=True)
class Row:
    """Figures of one shape: those of sharing / those of plain packing."""

    shape: str
    tokens: int
    flops: float
    time: float
    cpu: float
    error: float


def measure(
    name: str, draw: Callable[[np.random.Generator, int], TrainBatch], steps: int, threads: int
) -> Row:
    """Compare the sides over ``steps`` steps after the first one."""
    rng = np.random.default_rng(0)
    batches = [draw(rng, step) for step in range(steps + 1)]
    with tempfile.TemporaryDirectory() as folder:
        policy().save_pretrained(folder)
        setups = {
            share: partial(
                side, config_of(Path(folder), {"microbatch_tokens": 8192, "share_prefixes": share}), batches
            )
            for share in ("off", "auto")
        }
        _, turns = take_turns(setups, len(batches), threads)
    plain, shared = turns["off"], turns["auto"]
    return Row(
        shape=name,
        tokens=sum(len(each.tokens_T) for each in batches[0].trajectories),
        flops=sum(turn.result.tflop for turn in shared) / sum(turn.result.tflop for turn in plain),
        time=_median(shared, "seconds") / _median(plain, "seconds"),
        cpu=_median(shared, "cpu_seconds") / _median(plain, "cpu_seconds"),
        error=max(
            float((np.abs(ours - theirs) / np.maximum(1, np.abs(theirs))).max())
            for ours, theirs in zip(shared[0].result.logps, plain[0].result.logps, strict=True)
        ),
    )


def _median(turns: Sequence[Turn[Learned]], figure: str) -> float:
    return median(getattr(turn, figure) for turn in turns[1:])


TABLE: Columns[Row] = {
    "": lambda row: row.shape,
    "tokens": lambda row: f"{row.tokens:,}",
    "FLOPs": lambda row: f"{row.flops:.3f}",
    "time": lambda row: f"{row.time:.3f}",
    "of CPU": lambda row: f"{row.cpu:.3f}",
    "largest error": lambda row: f"{row.error:.1e}",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=2)
    options.add_argument("--threads", type=int, default=RANK_THREADS)
    arguments = options.parse_args()
    rows = {
        name: measure(name, draw, arguments.steps, arguments.threads)
        for name, draw in (("traces", traces), ("groups", groups))
    }
    table_console().print(rows_table("shared prefixes / plain packing", list(rows.values()), TABLE))
    document = {
        "traces_flops": rows["traces"].flops,
        "traces_time": rows["traces"].time,
        "traces_cpu": rows["traces"].cpu,
        "groups_flops": rows["groups"].flops,
        "groups_time": rows["groups"].time,
        "largest_error": max(row.error for row in rows.values()),
        "asked": GOALS,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
