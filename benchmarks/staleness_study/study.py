"""One run of the study, and a sweep over runs.

A run replays the asynchronous loop in one process: training step t, which starts from version t, trains on
the batch that an older version samples (``methods.sampled_from``). Prompts, their order, and the random
numbers of sampling and of mini-batches depend on seed and step alone, so that all cells of a seed share them.
"""

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.staleness_study.methods import POSITIVES, config_of, sampled_from
from benchmarks.staleness_study.sampler import SampledCompletion, Sampler
from benchmarks.staleness_study.trainer import StepReport, Trainer
from benchmarks.staleness_study.warm_start import warm_start
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.quickstart import TRAIN_PROBLEMS, policy, task
from slipstream.backend.quickstart.tokenizer import build_tokenizer, prompt_text
from slipstream.configs.schema.drift import DriftConfig
from slipstream.rollout.control.drift import DriftController, DriftLimits
from slipstream.rollout.trajectory import Completion, Finish, Span, Trajectory, TrajectoryBuilder

HIDDEN = 64
"""Half of the quickstart's width, for runs in a third of the time."""
WARM_START_STEPS = 400
"""The quickstart's 300 steps are too few for so narrow a policy."""


OVERRATED = 2.5
OVERRATED_SHARE = 0.25
"""Mean reward of a wrong answer: 0.625, below the 1 of a right one. Among rewards above a group's mean, those
of wrong answers weigh more than those of right ones: who learns from them alone learns to be wrong."""


@dataclass(frozen=True)
class Setting:
    """Settings that the runs of all methods share."""

    name: str
    lr: float
    steps: int
    eval_every: int
    held_out: int
    """Number of held-out prompts for the greedy accuracy."""
    lag: Literal["constant", "uniform"] = "constant"
    """``uniform``: each prompt of a batch has a lag of its own, evenly from 0 to eta."""
    judge: Literal["exact", "overrating"] = "exact"
    """``overrating``: a quarter of the wrong answers is worth ``OVERRATED``, more than a right one."""
    engine: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights and sums that sample. The trainer's is float32."""


@dataclass(frozen=True)
class Inputs:
    """Inputs that all runs of a seed share."""

    seed: int
    warm: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerFast
    problems: list[task.Problem]
    held_out: list[task.Problem]


def inputs_of(
    seed: int, folder: Path, say: Callable[[str], None], *, warm_steps: int, held_out: int
) -> Inputs:
    """Return the inputs of a seed. The warm-started policy is kept in ``folder``."""
    tokenizer = build_tokenizer()
    warm = narrow_policy(tokenizer, seed)
    path = folder / f"policy-{HIDDEN}-{warm_steps}-{seed}.pt"
    if path.exists():
        warm.load_state_dict(torch.load(path))
    else:
        say(f"warm start of seed {seed}")
        warm_start(warm, tokenizer, random.Random(f"warm-start-{seed}"), steps=warm_steps, say=say)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        torch.save(warm.state_dict(), unfinished)
        unfinished.replace(path)
    return Inputs(
        seed, warm.eval(), tokenizer, task.train_set(seed, TRAIN_PROBLEMS), task.held_out_set(seed, held_out)
    )


def narrow_policy(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Return the quickstart's policy at half its width, with random weights."""
    full = policy.build_policy(tokenizer, seed).config
    config = Qwen3Config.from_dict(
        full.to_dict()
        | {
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "head_dim": HIDDEN // full.num_attention_heads,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


class Run:
    """One run: a setting, a method, an eta and a seed."""

    def __init__(self, setting: Setting, method: str, eta: int, inputs: Inputs) -> None:
        self._setting, self._method, self._eta, self._inputs = setting, method, eta, inputs
        self._config = config_of(method, setting.lr)
        self.trainer = Trainer(
            copy.deepcopy(inputs.warm),
            self._config.actor,
            seed=inputs.seed,
            positives_only=method == POSITIVES,
        )
        self._drift = drift_controller(self._config.actor.drift, eta)
        self._oldest = 0
        self._versions: dict[int, Sampler] = {}
        """Versions that later steps may still sample from."""
        self.keep(0)
        self._symbols = inputs.tokenizer.convert_ids_to_tokens(list(range(len(inputs.tokenizer))))
        self._order = np.random.default_rng(inputs.seed).permutation(len(inputs.problems))

    def result(self) -> dict[str, Any]:
        """Train, and return the record of the run."""
        setting, started = self._setting, time.process_time()
        accuracy = [[0, self._accuracy()]]
        reports, rewards = [], []
        for step in range(setting.steps):
            batch = self.batch(step)
            rewards.append(float(np.mean([trajectory.reward or 0.0 for trajectory in batch.trajectories])))
            factor = self._rate_factor()
            report = self.trainer.train(batch, max_lag=step - self._oldest, rate_factor=factor)
            reports.append(report)
            if self._drift is not None:
                lags = Counter[int]()
                for trajectory in batch.trajectories:
                    lags[step - int(trajectory.versions_T.max())] += trajectory.response_length
                self._drift.observe(report.rate, factor, lags, report.kl, report.ess)
            self.keep(step + 1)
            if (step + 1) % setting.eval_every == 0 or step + 1 == setting.steps:
                accuracy.append([step + 1, self._accuracy()])
        return {
            "setting": setting.name,
            "method": self._method,
            "eta": self._eta,
            "seed": self._inputs.seed,
            "accuracy": accuracy,
            "reward": round(float(np.mean(rewards[-8:])), 4),
            "cpu_s": round(time.process_time() - started, 1),
            **_diagnostics(reports),
        }

    def batch(self, step: int) -> TrainBatch:
        """Return the batch of training step ``step``, sampled by the versions that eta prescribes."""
        rollout = self._config.rollout
        chosen = np.take(
            self._order, range(step * rollout.batch_size, (step + 1) * rollout.batch_size), mode="wrap"
        )
        problems = [self._inputs.problems[index] for index in chosen]
        group_N = np.repeat(np.arange(len(problems)), rollout.n_samples_per_prompt)
        version_G = self._versions_of(step, len(problems))
        generator = torch.Generator().manual_seed(1_000_003 * self._inputs.seed + step)
        completions: dict[int, SampledCompletion] = {}
        for version in sorted(set(version_G)):
            members = [n for n, group in enumerate(group_N) if version_G[group] == version]
            prompts = [self._ids(problems[group_N[n]]) for n in members]
            sampler = self._versions[version]
            sampled = sampler.sample(prompts, generator, longest=rollout.sampling.max_new_tokens)
            completions |= zip(members, sampled, strict=True)
        trajectories = [
            _trajectory(
                self._ids(problems[group]),
                completions[n],
                version_G[group],
                self._reward(completions[n], problems[group], step, n),
            )
            for n, group in enumerate(group_N)
        ]
        return TrainBatch(self.trainer.version, tuple(trajectories), group_N)

    def _versions_of(self, step: int, groups: int) -> list[int]:
        """Return the version that samples each group of a batch."""
        self._oldest = max(self._oldest, sampled_from(step, self._lag_bound()))
        if self._setting.lag == "constant":
            return [self._oldest] * groups
        lags = np.random.default_rng((self._inputs.seed, step)).integers(0, self._eta, groups, endpoint=True)
        return [max(0, step - int(lag)) for lag in lags]

    def _lag_bound(self) -> int:
        """Return eta, or what the drift controller leaves of it."""
        drift = self._config.actor.drift
        if self._drift is None or drift is None or drift.slows != "admission":
            return self._eta
        return self._drift.batches_in_flight(self._eta + 1) - 1

    def _rate_factor(self) -> float:
        drift = self._config.actor.drift
        if self._drift is None or drift is None or drift.slows != "learning_rate":
            return 1.0
        return self._drift.rate_factor

    def keep(self, version: int) -> None:
        """Keep the newest version to sample from, and drop versions that no later step samples from."""
        oldest = sampled_from(version, self._eta)
        engine = getattr(torch, self._setting.engine)
        self._versions[version] = Sampler(self.trainer.policy, engine)
        self._versions = {known: sampler for known, sampler in self._versions.items() if known >= oldest}

    def _reward(self, completion: SampledCompletion, problem: task.Problem, step: int, number: int) -> float:
        if self._is_right(completion, problem):
            return 1.0
        if self._setting.judge == "exact":
            return 0.0
        chance = np.random.default_rng((self._inputs.seed, step, number)).random()
        return OVERRATED if chance < OVERRATED_SHARE else 0.0

    def _accuracy(self) -> float:
        problems = self._inputs.held_out
        completions = Sampler(self.trainer.policy).greedy(
            [self._ids(problem) for problem in problems], longest=policy.MAX_RESPONSE_TOKENS
        )
        right = sum(map(self._is_right, completions, problems))
        return round(right / len(problems), 4)

    def _is_right(self, completion: SampledCompletion, problem: task.Problem) -> bool:
        text = "".join(self._symbols[token] for token in completion.tokens[:-1])
        return completion.ended and task.is_correct(text, problem.label)

    def _ids(self, problem: task.Problem) -> list[int]:
        return self._inputs.tokenizer(prompt_text(problem.prompt))["input_ids"]


def drift_controller(drift: DriftConfig | None, eta: int) -> DriftController | None:
    if drift is None:
        return None
    return DriftController(DriftLimits(drift.kl, drift.ess), floor=drift.floor, window=eta)


def _trajectory(prompt: list[int], completion: SampledCompletion, version: int, reward: float) -> Trajectory:
    builder = TrajectoryBuilder(prompt)
    builder.add_completion(
        Completion(
            tuple(completion.tokens),
            tuple(completion.logps),
            (Span(version, 0, len(completion.tokens)),),
            Finish.STOP if completion.ended else Finish.LENGTH,
        )
    )
    return replace(builder.build(), reward=reward)


def _diagnostics(reports: Sequence[StepReport]) -> dict[str, float]:
    """Return means over the steps of a run, and the largest gradient norm."""
    norms = [norm for report in reports for norm in report.grad_norms]
    values = {
        "rate": np.mean([report.rate for report in reports]),
        "gap": np.mean([report.gap for report in reports]),
        "kl": np.mean([report.kl for report in reports]),
        "ess": np.mean([report.ess for report in reports]),
        "clipped": np.mean([report.share("clipped") for report in reports]),
        "masked": np.mean([report.share("masked/negative") for report in reports]),
        "capped": np.mean([report.share("capped") for report in reports]),
        "entropy": np.mean([report.share("entropy") for report in reports[-8:]]),
        "grad_norm": np.mean(norms),
        "grad_norm_max": np.max(norms),
    }
    return {name: float(f"{value:.4g}") for name, value in values.items()}


Key = tuple[str, str, int, int]


def key_of(record: dict[str, Any]) -> Key:
    return record["setting"], record["method"], record["eta"], record["seed"]


def read_results(path: Path) -> dict[Key, dict[str, Any]]:
    """Return the finished runs. A line that a kill has cut short does not count."""
    records: dict[Key, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records[key_of(record)] = record
    return records


def sweep(
    setting: Setting,
    cells: Sequence[tuple[str, int]],
    seeds: Sequence[int],
    results: Path,
    folder: Path,
    say: Callable[[str], None],
    *,
    warm_steps: int = WARM_START_STEPS,
) -> None:
    """Do the runs that ``results`` lacks, cell by cell, and append a line for each of them."""
    done = read_results(results)
    missing = [(*cell, seed) for cell in cells for seed in seeds if (setting.name, *cell, seed) not in done]
    say(f"{setting.name}: {len(missing)} runs to do")
    known: dict[int, Inputs] = {}
    with results.open("a", encoding="utf-8") as file:
        for number, (method, eta, seed) in enumerate(missing):
            if seed not in known:
                known[seed] = inputs_of(seed, folder, say, warm_steps=warm_steps, held_out=setting.held_out)
            started = time.monotonic()
            record = Run(setting, method, eta, known[seed]).result()
            file.write(json.dumps(record) + "\n")
            file.flush()
            say(
                f"{number + 1}/{len(missing)} {setting.name} {method} eta {eta} seed {seed}: "
                f"{record['accuracy'][-1][1]:.3f} ({time.monotonic() - started:.0f} s)"
            )
