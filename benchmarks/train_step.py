"""A training step against the same step in plain PyTorch: transformers' model and torch's AdamW, one process.

    python -m benchmarks.train_step        # two minutes, 3 GB

The step is decoupled PPO as the trainer does it on one rank: packing, recomputed proximal log-probs (the
first mini-batch takes those of its own pass, on both sides), mini-batches, gradient clipping, Adam,
statistics. The plain side pads trajectories of similar length into
tensors of the size that is fastest on this machine, or takes them one by one. It uses
scaled_dot_product_attention, multiplies only tokens that carry loss with the LM head, and has a fused AdamW.
Both sides train the same model on the same batches, and their losses are compared.

Each side has a process of its own, and they take turns. Ratios are of medians, by the clock and of the CPU.
"""

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.harness import RANK_THREADS, Turn, parser, take_turns
from slipstream.backend.batch.packing import split_minibatches
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.backend.quickstart import task
from slipstream.backend.quickstart.policy import build_policy
from slipstream.backend.quickstart.tokenizer import build_tokenizer, demonstration_text, prompt_text
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.objective import PPOObjective
from slipstream.rollout.system.network import hold_port, port_of
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory

if TYPE_CHECKING:
    from slipstream.backend.trainer.rank import TrainerRank

ASKED = {"step_ratio": 1.1}
CLIP_GRAD = 1.0
WARM_UP = 2
"""Number of first steps that do not count."""


# ---- what is trained


@dataclass(frozen=True)
class Shape:
    """A model, and trajectories to train it on."""

    minibatches: int
    microbatch_tokens: int
    policy: Callable[[], PreTrainedModel]
    texts: Callable[[np.random.Generator], list[tuple[int, np.ndarray]]]
    """Draws the trajectories of a step: the number of prompt tokens, and all tokens."""

    @property
    def settings(self) -> dict[str, object]:
        """Settings of ``actor``."""
        return {"minibatches": self.minibatches, "microbatch_tokens": self.microbatch_tokens}


def quickstart_policy() -> PreTrainedModel:
    return build_policy(build_tokenizer(), seed=0)


def quickstart_texts(rng: np.random.Generator) -> list[tuple[int, np.ndarray]]:
    tokenizer, draw, texts = build_tokenizer(), random.Random(int(rng.integers(2**31))), []
    for problem in islice(task.train_problems(draw), 128):
        text = demonstration_text(problem.prompt, task.noisy_demonstration(problem.prompt, draw))
        prompt = tokenizer(prompt_text(problem.prompt))["input_ids"]
        texts.append((len(prompt), np.array(tokenizer(text)["input_ids"])))
    return texts


def middle_policy() -> PreTrainedModel:
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
    """Return groups of eight with random rewards and behaviour log-probs.

    Rewarded trajectories are less likely under the behaviour policy. Their importance weights then keep the
    loss away from 0.
    """
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


def config_of(folder: Path, actor: Mapping[str, object], dtype: str = "float32") -> RunConfig:
    """Return a recipe for the model in ``folder`` with these settings of ``actor``."""
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
    """One side of the comparison."""

    way: str
    """Way in which the side puts trajectories into tensors."""

    def __init__(self, config: RunConfig, first: TrainBatch) -> None: ...

    def step(self, batch: TrainBatch) -> "Learned":
        """Train on the batch."""
        ...


class Learned(NamedTuple):
    """Loss and gradient norm of a step."""

    loss: float
    grad_norm: float


def lone_rank(config: RunConfig) -> "TrainerRank":
    """Return a trainer with a single rank, in this process."""
    # Imported here: the plain side must not import Megatron.
    from slipstream.backend.trainer.rank import TrainerRank

    host = "127.0.0.1"
    with hold_port(host) as holder:
        return TrainerRank(config, RankSpec(0, 1, host, port_of(holder)))


class Ours:
    """The trainer of the product."""

    way = "packed"

    def __init__(self, config: RunConfig, first: TrainBatch) -> None:
        self._trainer = lone_rank(config)

    def step(self, batch: TrainBatch) -> Learned:
        metrics = self._trainer.train(batch)
        assert metrics is not None
        return Learned(metrics["train/loss"], metrics["train/grad_norm"])


class Plain:
    """Plain PyTorch."""

    def __init__(self, config: RunConfig, first: TrainBatch) -> None:
        self._actor, self._seed = config.actor, config.run.seed
        self._objective = cast(PPOObjective, config.actor.objective)
        self._temperature = config.rollout.sampling.temperature
        self._model = Qwen3ForCausalLM.from_pretrained(
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
        """Return the CPU seconds of a mini-batch, which other work on the machine does not change."""
        self._limit, took = limit, []
        part = range(len(batch.trajectories))[:: self._actor.minibatches]
        for _ in range(3):
            began = time.process_time()
            for chunk in self._chunks(batch, part):
                self._logp([batch.trajectories[i] for i in chunk]).sum().backward()
            took.append(time.process_time() - began)
            self._optimizer.zero_grad()
        return min(took)

    def step(self, batch: TrainBatch) -> Learned:
        trajectories, objective = batch.trajectories, self._objective
        advantage_N = self._advantages(batch)
        proximal: dict[int, Tensor] = {}
        draw = np.random.default_rng((self._seed, self._steps))
        minibatches = split_minibatches(np.arange(len(trajectories)), self._actor.minibatches, draw)
        later = [int(i) for minibatch in minibatches[1:] for i in minibatch]
        with torch.no_grad():
            for chunk in self._chunks(batch, later):
                parts = [trajectories[i] for i in chunk]
                logps = self._logp(parts).split([part.response_length for part in parts])
                proximal |= dict(zip(chunk, logps, strict=True))
        total, norms = 0.0, []
        for minibatch in minibatches:
            tokens = sum(trajectories[i].response_length for i in minibatch)
            for chunk in self._chunks(batch, minibatch.tolist()):
                parts = [trajectories[i] for i in chunk]
                counts = torch.tensor([part.response_length for part in parts])
                logp = self._logp(parts)
                old = (
                    torch.cat([proximal[i] for i in chunk]) if proximal.keys() >= {*chunk} else logp.detach()
                )
                behaviour = torch.from_numpy(
                    np.concatenate([part.logprobs_T[part.loss_mask_T] for part in parts])
                )
                advantage = advantage_N[torch.tensor(chunk)].repeat_interleave(counts)
                ratio = (logp - old).exp()
                clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
                weight = (old - behaviour).exp().clamp(max=self._actor.correction.weight_cap)
                loss = -(weight * torch.min(ratio * advantage, clipped * advantage)).sum()
                (loss / tokens).backward()
                total += loss.item()
            norms.append(clip_grad_norm_(self._model.parameters(), CLIP_GRAD).item())
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._steps += 1
        tokens = sum(trajectory.response_length for trajectory in trajectories)
        return Learned(total / tokens, sum(norms) / len(norms))

    def _advantages(self, batch: TrainBatch) -> Tensor:
        reward_GK = torch.tensor([t.reward for t in batch.trajectories], dtype=torch.float64).view(-1, 8)
        centred_GK = reward_GK - reward_GK.mean(1, keepdim=True)
        return (centred_GK / (reward_GK.std(1, keepdim=True) + 1e-6)).flatten().float()

    def _chunks(self, batch: TrainBatch, indices: Sequence[int]) -> list[list[int]]:
        """Return trajectories for each forward pass: of similar length, within the limit after padding."""
        chunks: list[list[int]] = []
        for i in sorted(indices, key=lambda i: -len(batch.trajectories[i].tokens_T)):
            longest = len(batch.trajectories[chunks[-1][0]].tokens_T) if chunks else 0
            if not chunks or (len(chunks[-1]) + 1) * longest > self._limit:
                chunks.append([])
            chunks[-1].append(i)
        return chunks

    def _logp(self, parts: list[Trajectory]) -> Tensor:
        """Return log-probs of the tokens that carry loss, one trajectory after the other.

        The mask is causal, so that no token sees the padding.
        """
        tokens_BT = pad_sequence([torch.from_numpy(part.tokens_T) for part in parts], batch_first=True)
        mask_BT = pad_sequence([torch.from_numpy(part.loss_mask_T) for part in parts], batch_first=True)
        hidden_BTH = self._model.model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        logits_MV = self._model.lm_head(hidden_BTH[:, :-1][mask_BT[:, 1:]]).float() / self._temperature
        return logits_MV.log_softmax(-1).gather(-1, tokens_BT[mask_BT][:, None])[:, 0]


def side(
    trainer: type[Trainer], config: RunConfig, batches: Sequence[TrainBatch]
) -> tuple[str, Callable[[int], Learned]]:
    """Set up one side for ``take_turns``."""
    made = trainer(config, batches[0])
    return made.way, lambda number: made.step(batches[number])


Side = tuple[type[Trainer], RunConfig]


def compare(
    sides: Mapping[str, Side], batches: Sequence[TrainBatch], threads: int
) -> tuple[dict[str, str], dict[str, list[Turn[Learned]]]]:
    """Let each side train on every batch. Return how each side works, and its turns."""
    setups = {name: partial(side, trainer, config, batches) for name, (trainer, config) in sides.items()}
    return take_turns(setups, len(batches), threads)


@contextmanager
def work(shape: Shape, steps: int) -> Iterator[tuple[Path, list[TrainBatch]]]:
    """Yield a folder with the policy, and a batch for every step."""
    with tempfile.TemporaryDirectory() as folder:
        shape.policy().save_pretrained(folder)
        rng = np.random.default_rng(0)
        yield Path(folder), [batch_of(shape.texts(rng), step, rng) for step in range(steps)]


def median_of(turns: Sequence[Turn[Learned]], figure: Literal["seconds", "cpu_seconds"]) -> float:
    """Return the median over the steps that count."""
    return median(map(attrgetter(figure), turns[WARM_UP:]))


def difference(ours: Sequence[Turn[Learned]], plain: Sequence[Turn[Learned]], figure: str) -> float:
    """Return the largest relative difference of the two sides."""
    pairs = [
        (getattr(mine.result, figure), getattr(theirs.result, figure))
        for mine, theirs in zip(ours, plain, strict=True)
    ]
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


@dataclass(frozen=True)
class Row:
    """Figures of one shape."""

    shape: str
    tokens: int
    step_ratio: float
    cpu_ratio: float
    step_s: float
    plain_step_s: float
    plain_way: str
    loss_difference: float
    grad_norm_difference: float


def measure(name: str, steps: int, threads: int) -> Row:
    """Compare the sides over ``steps`` steps of a shape."""
    shape = SHAPES[name]
    with work(shape, steps + WARM_UP) as (folder, batches):
        config = config_of(folder, shape.settings)
        ways, turns = compare({"plain": (Plain, config), "ours": (Ours, config)}, batches, threads)
    ours, plain = turns["ours"], turns["plain"]
    return Row(
        shape=name,
        tokens=sum(len(t.tokens_T) for batch in batches for t in batch.trajectories) // len(batches),
        step_ratio=round(median_of(ours, "seconds") / median_of(plain, "seconds"), 3),
        cpu_ratio=round(median_of(ours, "cpu_seconds") / median_of(plain, "cpu_seconds"), 3),
        step_s=round(median_of(ours, "seconds"), 4),
        plain_step_s=round(median_of(plain, "seconds"), 4),
        plain_way=ways["plain"],
        loss_difference=difference(ours, plain, "loss"),
        grad_norm_difference=difference(ours, plain, "grad_norm"),
    )


TABLE: Columns[Row] = {
    "": lambda row: row.shape,
    "tokens": lambda row: f"{row.tokens:,}",
    "plain is": lambda row: row.plain_way,
    "plain s": lambda row: f"{row.plain_step_s:.3f}",
    "ours s": lambda row: f"{row.step_s:.3f}",
    "ratio": lambda row: f"{row.step_ratio:.2f}",
    "of CPU": lambda row: f"{row.cpu_ratio:.2f}",
    "loss apart": lambda row: f"{row.loss_difference:.1e}",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=15)
    options.add_argument("--threads", type=int, default=RANK_THREADS)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments = options.parse_args()
    rows = [measure(name, arguments.steps, arguments.threads) for name in arguments.shapes]
    table_console().print(rows_table("a training step", rows, TABLE, left=["plain is"]))
    document = {
        "step_ratio": max(row.step_ratio for row in rows),
        "asked": ASKED,
        "shapes": {row.shape: asdict(row) for row in rows},
        "threads": arguments.threads,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
