"""One run of the study.

A run replays the asynchronous loop in one process: training step t, which starts from version t, trains on
the batch that an older version samples (``methods.sampled_from``). Prompts, their order, and the random
numbers of sampling and of mini-batches depend on seed and step alone, so that all cells of a seed share them.
"""

import copy
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.staleness_study.methods import POSITIVES, config_of, sampled_from
from benchmarks.staleness_study.sampler import Precision, SampledCompletion, Sampler
from benchmarks.staleness_study.trainer import DROPPED, FAILURES, StepReport, Trainer
from benchmarks.staleness_study.warm_start import warm_start
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.quickstart import TRAIN_PROBLEMS, policy, task
from slipstream.backend.quickstart.tokenizer import build_tokenizer, prompt_text
from slipstream.configs.schema.actor import DriftConfig
from slipstream.rollout.control.drift import DriftController, DriftLimits
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span, Trajectory, TrajectoryBuilder

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
    engine: Precision = "float32"
    """Precision of the engine that samples. The trainer's is float32."""


@dataclass(frozen=True)
class Inputs:
    """Inputs that all runs of a seed share."""

    seed: int
    warm: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerFast
    problems: list[task.Problem]
    held_out: list[task.Problem]

    @cached_property
    def warm_accuracy(self) -> float:
        return self.accuracy(Sampler(self.warm))

    def accuracy(self, sampler: Sampler) -> float:
        """Return the accuracy of greedy completions on the held-out prompts."""
        prompts = [self.ids(problem) for problem in self.held_out]
        completions = sampler.greedy(prompts, longest=policy.MAX_RESPONSE_TOKENS)
        return round(sum(map(self.is_right, completions, self.held_out)) / len(self.held_out), 4)

    def is_right(self, completion: SampledCompletion, problem: task.Problem) -> bool:
        text = "".join(self._symbols[token] for token in completion.tokens[:-1])
        return completion.ended and task.is_correct(text, problem.label)

    def ids(self, problem: task.Problem) -> list[int]:
        """Return the token ids of the prompt of ``problem``."""
        if problem.prompt not in self._known_ids:
            self._known_ids[problem.prompt] = self.tokenizer(prompt_text(problem.prompt))["input_ids"]
        return self._known_ids[problem.prompt]

    @cached_property
    def _symbols(self) -> list[str]:
        return [str(self.tokenizer.convert_ids_to_tokens(token)) for token in range(len(self.tokenizer))]

    @cached_property
    def _known_ids(self) -> dict[str, list[int]]:
        """Token ids by prompt."""
        return {}


def warm_path(folder: Path, seed: int, warm_steps: int) -> Path:
    return folder / f"policy-{HIDDEN}-{warm_steps}-{seed}.pt"


def inputs_of(seed: int, folder: Path, *, warm_steps: int, held_out: int) -> Inputs:
    """Return the inputs of a seed. The warm-started policy is kept in ``folder``."""
    tokenizer = build_tokenizer()
    warm = narrow_policy(tokenizer, seed)
    path = warm_path(folder, seed, warm_steps)
    if path.exists():
        warm.load_state_dict(torch.load(path))
    else:
        warm_start(warm, tokenizer, random.Random(f"warm-start-{seed}"), steps=warm_steps)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
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
        self._order = np.random.default_rng(inputs.seed).permutation(len(inputs.problems))

    def result(self) -> dict[str, Any]:
        """Train, and return the record of the run."""
        setting, started = self._setting, time.process_time()
        accuracy = [[0, self._inputs.warm_accuracy]]
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
            prompts = [self._inputs.ids(problems[group_N[n]]) for n in members]
            sampler = self._versions[version]
            sampled = sampler.sample(prompts, generator, longest=rollout.sampling.max_new_tokens)
            completions |= zip(members, sampled, strict=True)
        trajectories = [
            _trajectory(
                self._inputs.ids(problems[group]),
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
        self._versions[version] = Sampler(self.trainer.policy, self._setting.engine)
        self._versions = {known: sampler for known, sampler in self._versions.items() if known >= oldest}

    def _reward(self, completion: SampledCompletion, problem: task.Problem, step: int, number: int) -> float:
        if self._inputs.is_right(completion, problem):
            return 1.0
        if self._setting.judge == "exact":
            return 0.0
        chance = np.random.default_rng((self._inputs.seed, step, number)).random()
        return OVERRATED if chance < OVERRATED_SHARE else 0.0

    def _accuracy(self) -> float:
        exact = self._setting.engine == "float32"
        newest = self._versions[self.trainer.version] if exact else Sampler(self.trainer.policy)
        return self._inputs.accuracy(newest)


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
    """Return means over the steps of a run, the largest gradient norm, and shares of dropped failures."""
    norms = [norm for report in reports for norm in report.grad_norms]
    failures = sum(report.totals[FAILURES] for report in reports)
    first_failures = sum(report.first_failures for report in reports)
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
        "dropped": sum(report.totals[DROPPED] for report in reports) / max(1, failures),
        "dropped_first": sum(report.first_dropped for report in reports) / max(1, first_failures),
    }
    return {name: float(f"{value:.4g}") for name, value in values.items()}
