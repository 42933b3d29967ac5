"""A training step against the same step in plain PyTorch: transformers' model and torch's AdamW, one process.

    python -m benchmarks.train_step        # two minutes, 3 GB

The step of decoupled PPO as the trainer does it on one rank: packing, recomputed proximal log-probs,
mini-batches, gradient clipping, Adam, statistics. The other side pads trajectories of similar length into
tensors of as many tokens as are fastest here, or takes them one by one; it uses scaled_dot_product_attention,
multiplies only tokens that carry loss with the LM head, and has AdamW fused. Both train the same model on the
same batches, and their losses are compared.

Each side is a process of its own, and they take turns; ratios are of medians, by the clock and of the CPU.
"""

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slipstream.backend.batch.micro_batch import TrainBatch
from slipstream.backend.batch.packing import split_minibatches
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart import task
from slipstream.backend.quickstart.policy import build_policy
from slipstream.backend.quickstart.tokenizer import build_tokenizer, demonstration_text, prompt_text
from slipstream.configs.schema import RunConfig
from slipstream.rollout.network import free_port
from slipstream.rollout.trajectory import UNSAMPLED, Finish, Trajectory

ASKED = {"step_ratio": 1.1}
CLIP_GRAD = 1.0
WARM_UP = 2
"""Steps that are not counted."""


# ---- what is trained


@dataclass(frozen=True)
class Shape:
    minibatches: int
    microbatch_tokens: int
    policy: Callable[[], torch.nn.Module]
    texts: Callable[[np.random.Generator], list[tuple[int, np.ndarray]]]
    """Of a step: how many tokens the prompt has, and all tokens."""

    @property
    def settings(self) -> dict[str, int]:
        """Of ``actor``."""
        return {"minibatches": self.minibatches, "microbatch_tokens": self.microbatch_tokens}


def quickstart_policy() -> torch.nn.Module:
    return build_policy(build_tokenizer(), seed=0)


def quickstart_texts(rng: np.random.Generator) -> list[tuple[int, np.ndarray]]:
    tokenizer, draw, found = build_tokenizer(), random.Random(int(rng.integers(2**31))), []
    for problem in islice(task.train_problems(draw), 128):
        text = demonstration_text(problem.prompt, task.noisy_demonstration(problem.prompt, draw))
        prompt = tokenizer(prompt_text(problem.prompt))["input_ids"]
        found.append((len(prompt), np.array(tokenizer(text)["input_ids"])))
    return found


def middle_policy() -> torch.nn.Module:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32_000,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )


def middle_texts(rng: np.random.Generator) -> list[tuple[int, np.ndarray]]:
    lengths = np.clip(rng.lognormal(np.log(120), 0.6, 16), 40, 500).astype(int)
    return [(32, rng.integers(0, 32_000, length)) for length in lengths]


SHAPES = {
    "quickstart": Shape(4, 4096, quickstart_policy, quickstart_texts),
    "middle": Shape(2, 1024, middle_policy, middle_texts),
}


def batch_of(texts: list[tuple[int, np.ndarray]], version: int, rng: np.random.Generator) -> TrainBatch:
    """Rewards and behaviour log-probs are drawn; groups are of eight. Rewarded ones are less likely under the
    behaviour policy, whose weights then keep the loss away from 0."""
    trajectories = []
    for prompt, tokens in texts:
        reward, sampled = float(rng.random() < 0.5), np.arange(len(tokens)) >= prompt
        logp = np.where(sampled, -rng.exponential(1.0, len(tokens)) - 2 * reward, 0)
        trajectories.append(
            Trajectory(
                tokens,
                sampled,
                logp.astype(np.float32),
                np.where(sampled, version, UNSAMPLED).astype(np.int32),
                Finish.STOP,
                reward=reward,
            )
        )
    return TrainBatch(version, tuple(trajectories), np.arange(len(texts)) // 8)


def config_of(folder: Path, dtype: str = "float32", **actor: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "benchmark", "steps": 1, "step_timeout_s": 600},
            "model": {"path": str(folder), "dtype": dtype},
            "data": {"path": "unused.jsonl"},
            "actor": {
                "optimizer": {"lr": 2.5e-4, "clip_grad": CLIP_GRAD},
                **actor,
            },
            "rollout": {
                "max_head_offpolicyness": 4,
                "batch_size": 1,
                "n_samples_per_prompt": 8,
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
        }
    )


# ---- the two sides


class Trainer(Protocol):
    def step(self, batch: TrainBatch) -> tuple[float, float]:
        """Train on it; the loss and the norm of the gradient."""


class Ours:
    way = "packed"

    def __init__(self, config: RunConfig, first: TrainBatch) -> None:
        from slipstream.backend.trainer.rank import TrainerRank

        host = "127.0.0.1"
        self._trainer = TrainerRank(config, RankSpec(0, 1, host, free_port(host)))

    def step(self, batch: TrainBatch) -> tuple[float, float]:
        metrics = self._trainer.train(batch)
        assert metrics is not None
        return metrics["train/loss"], metrics["train/grad_norm"]


class Plain:
    def __init__(self, config: RunConfig, first: TrainBatch) -> None:
        self._actor, self._seed = config.actor, config.run.seed
        self._temperature = config.rollout.sampling.temperature
        self._model = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, attn_implementation="sdpa"
        )
        settings = self._actor.optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=0.0,
            fused=True,
        )
        self._steps = 0
        budget = self._actor.microbatch_tokens
        took = {limit: self._time_of(limit, first) for limit in (budget, budget // 2, budget // 4, 0)}
        self._limit = min(took, key=lambda limit: took[limit])
        self.way = f"padded to {self._limit}" if self._limit else "one by one"

    def _time_of(self, limit: int, batch: TrainBatch) -> float:
        """Seconds of CPU for a minibatch, which other work on the machine does not change."""
        self._limit, took = limit, []
        part = range(len(batch.trajectories))[:: self._actor.minibatches]
        for _ in range(3):
            began = time.process_time()
            for chunk in self._chunks(batch, part):
                self._logp([batch.trajectories[i] for i in chunk]).sum().backward()
            took.append(time.process_time() - began)
            self._optimizer.zero_grad()
        return min(took)

    def step(self, batch: TrainBatch) -> tuple[float, float]:
        trajectories, objective = batch.trajectories, self._actor.objective
        advantage_N = self._advantages(batch)
        proximal: dict[int, Tensor] = {}
        with torch.no_grad():
            for chunk in self._chunks(batch, range(len(trajectories))):
                parts = [trajectories[i] for i in chunk]
                logps = self._logp(parts).split([part.response_length for part in parts])
                proximal |= dict(zip(chunk, logps, strict=True))
        total, norms = 0.0, []
        draw = np.random.default_rng((self._seed, self._steps))
        for minibatch in split_minibatches(len(trajectories), self._actor.minibatches, draw):
            tokens = sum(trajectories[i].response_length for i in minibatch)
            for chunk in self._chunks(batch, minibatch.tolist()):
                parts = [trajectories[i] for i in chunk]
                counts = torch.tensor([part.response_length for part in parts])
                old = torch.cat([proximal[i] for i in chunk])
                behaviour = torch.from_numpy(
                    np.concatenate([part.logprobs_T[part.loss_mask_T] for part in parts])
                )
                advantage = advantage_N[torch.tensor(chunk)].repeat_interleave(counts)
                ratio = (self._logp(parts) - old).exp()
                clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
                weight = (old - behaviour).exp().clamp(max=self._actor.correction.weight_cap)
                loss = -(weight * torch.min(ratio * advantage, clipped * advantage)).sum()
                (loss / tokens).backward()
                total += loss.item()
            norms.append(clip_grad_norm_(self._model.parameters(), CLIP_GRAD).item())
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._steps += 1
        return total / sum(t.response_length for t in trajectories), sum(norms) / len(norms)

    def _advantages(self, batch: TrainBatch) -> Tensor:
        reward_GK = torch.tensor([t.reward for t in batch.trajectories], dtype=torch.float64).view(-1, 8)
        centred_GK = reward_GK - reward_GK.mean(1, keepdim=True)
        return (centred_GK / (reward_GK.std(1, keepdim=True) + 1e-6)).flatten().float()

    def _chunks(self, batch: TrainBatch, indices: Sequence[int]) -> list[list[int]]:
        """Trajectories for one forward pass: of similar length, within the limit of tokens when padded."""
        found: list[list[int]] = []
        for i in sorted(indices, key=lambda i: -len(batch.trajectories[i].tokens_T)):
            longest = len(batch.trajectories[found[-1][0]].tokens_T) if found else 0
            if not found or (len(found[-1]) + 1) * longest > self._limit:
                found.append([])
            found[-1].append(i)
        return found

    def _logp(self, parts: list[Trajectory]) -> Tensor:
        """Of the tokens that carry loss, one trajectory after the other. Causal: padding is never seen."""
        tokens_BT = pad_sequence([torch.from_numpy(part.tokens_T) for part in parts], batch_first=True)
        mask_BT = pad_sequence([torch.from_numpy(part.loss_mask_T) for part in parts], batch_first=True)
        hidden_BTH = self._model.model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        logits_MV = self._model.lm_head(hidden_BTH[:, :-1][mask_BT[:, 1:]]).float() / self._temperature
        return logits_MV.log_softmax(-1).gather(-1, tokens_BT[mask_BT][:, None])[:, 0]


@dataclass(frozen=True)
class Turn:
    seconds: float
    cpu_seconds: float
    loss: float
    grad_norm: float


def serve(
    pipe: Connection, side: type[Trainer], config: RunConfig, batches: list[TrainBatch], threads: int
) -> None:
    """One side: says how it runs, then takes a step for each message."""
    torch.set_num_threads(threads)
    trainer = side(config, batches[0])
    pipe.send(trainer.way)
    for batch in batches:
        if not pipe.recv():
            return
        began, cpu = time.perf_counter(), time.process_time()
        loss, norm = trainer.step(batch)
        pipe.send(Turn(time.perf_counter() - began, time.process_time() - cpu, loss, norm))


def take_turns(
    sides: dict[str, tuple[type[Trainer], RunConfig]], batches: list[TrainBatch], threads: int
) -> tuple[dict[str, str], dict[str, list[Turn]]]:
    """How each side runs, and its turns."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, (side, config) in sides.items():
        pipes[name], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, side, config, batches, threads), daemon=True).start()
        theirs.close()
    ways = {name: pipe.recv() for name, pipe in pipes.items()}
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for _ in batches:
        for name, pipe in pipes.items():
            pipe.send(True)
            turns[name].append(pipe.recv())
    return ways, turns


@contextmanager
def work(shape: Shape, steps: int):
    """A folder with the policy, and a batch for every step."""
    with tempfile.TemporaryDirectory() as folder:
        shape.policy().save_pretrained(folder)
        rng = np.random.default_rng(0)
        yield Path(folder), [batch_of(shape.texts(rng), step, rng) for step in range(steps)]


def median_of(turns: list[Turn], figure: str) -> float:
    return median(getattr(turn, figure) for turn in turns[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments = parser.parse_args()
    table = Table("", "tokens", "plain is", "plain s", "ours s", "ratio", "of CPU", "loss apart")
    shapes: dict[str, dict[str, Any]] = {}
    for name in arguments.shapes:
        shape = SHAPES[name]
        with work(shape, arguments.steps + WARM_UP) as (folder, batches):
            config = config_of(folder, **shape.settings)
            sides: dict[str, Any] = {"plain": (Plain, config), "ours": (Ours, config)}
            ways, turns = take_turns(sides, batches, arguments.threads)
        tokens = sum(len(t.tokens_T) for batch in batches for t in batch.trajectories) // len(batches)
        times = {
            (side, figure): median_of(of_side, figure)
            for side, of_side in turns.items()
            for figure in ("seconds", "cpu_seconds")
        }
        apart = {
            figure: max(
                abs(getattr(a, figure) - getattr(b, figure)) / abs(getattr(b, figure))
                for a, b in zip(turns["ours"], turns["plain"], strict=True)
            )
            for figure in ("loss", "grad_norm")
        }
        shapes[name] = {
            "step_ratio": round(times["ours", "seconds"] / times["plain", "seconds"], 3),
            "cpu_ratio": round(times["ours", "cpu_seconds"] / times["plain", "cpu_seconds"], 3),
            "step_s": round(times["ours", "seconds"], 4),
            "plain_step_s": round(times["plain", "seconds"], 4),
            "plain_way": ways["plain"],
            "loss_difference": apart["loss"],
            "grad_norm_difference": apart["grad_norm"],
        }
        table.add_row(
            name,
            f"{tokens:,}",
            ways["plain"],
            f"{times['plain', 'seconds']:.3f}",
            f"{times['ours', 'seconds']:.3f}",
            f"{shapes[name]['step_ratio']:.2f}",
            f"{shapes[name]['cpu_ratio']:.2f}",
            f"{apart['loss']:.1e}",
        )
    Console().print(table)
    worst = max(found["step_ratio"] for found in shapes.values())
    print(json.dumps({"step_ratio": worst, "asked": ASKED, "shapes": shapes, "threads": arguments.threads}))


if __name__ == "__main__":
    main()
