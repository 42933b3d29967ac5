"""Rewards of any size, from the evaluation of held-out prompts to the terminal and the files of a run."""

import asyncio
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.backend.driver.loops.evaluation import Evaluation
from slipstream.backend.monitor.metrics import METRICS_FILE, MetricsLog
from slipstream.backend.monitor.progress import PlainProgress
from slipstream.backend.monitor.recorder import Recorder
from slipstream.backend.monitor.status import RunStatus, StepTimes, TrainedStep
from slipstream.backend.monitor.summary import RunSummary, print_summary, write_summary
from slipstream.bridge.publish.report import PublishReport
from slipstream.configs.schema import EvalConfig, EvalSamplingConfig
from slipstream.rollout.collection.driver.questions import EvaluationTasks
from slipstream.rollout.collection.messages import Evaluated
from slipstream.rollout.control.ends import GroupCounts
from slipstream.rollout.control.slots import State
from slipstream.rollout.reward import FinalAnswer, Reward, is_accuracy
from slipstream.rollout.tokens.trajectory import Finish, Prompt, RewardParts, Trajectory

PROMPTS = [Prompt(i, f"prompt {i}", label=str(i)) for i in range(4)]


class PlusMinus:
    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        return 1.0 if prompt.id == 0 else -1.0


class OutOfTen:
    is_accuracy = False

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        return 2.5 * prompt.id + 2.5


class Huge:
    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        return -1.5e308


def parts_of(prompt: Prompt) -> RewardParts:
    """Every prompt has a place, only the first has a bonus."""
    return (("place", float(prompt.id)), *((("bonus", 0.5),) if prompt.id == 0 else ()))


class Asked(EvaluationTasks):
    """Completes every prompt with its label in two tokens, and has it judged."""

    def __init__(self, reward: Reward) -> None:
        super().__init__()
        self._reward = reward

    async def ask(
        self, prompts: Sequence[Prompt], version: int = 0, step: int = 0, samples: int = 1
    ) -> list[Evaluated]:
        assert step == version
        return [
            Evaluated(
                prompt.id,
                await self.reward_of(prompt),
                2,
                "",
                parts_of(prompt),
                metrics=(("calls", prompt.id),),
            )
            for prompt in prompts
            for _ in range(samples)
        ]

    async def reward_of(self, prompt: Prompt) -> float:
        return float(await self._reward.score(prompt, f"#{prompt.id}", trajectory()))


def trajectory() -> Trajectory:
    return Trajectory(
        np.arange(4), np.arange(4) >= 2, np.zeros(4, np.float32), np.full(4, 0, np.int32), Finish.STOP
    )


def test_each_of_several_sets_has_a_mean_of_its_own():
    heard: list[dict] = []

    class Listener:
        def evaluated(self, version, reward, length, parts, metrics, of_samples, *, is_logged):
            assert not of_samples
            heard.append({"reward": reward, **parts})

    prompts = [
        Prompt(0, "?", 0, source="easy"),
        Prompt(1, "?", 1, source="hard"),
        Prompt(2, "?", 2, source="hard"),
    ]
    settings = EvalConfig.model_validate(
        {"sets": [{"name": "easy", "path": "a.jsonl"}, {"name": "hard", "path": "b.jsonl"}]}
    )
    evaluation = Evaluation(settings, prompts, Asked(OutOfTen()), Listener(), step_of=int)  # type: ignore[arg-type]
    asyncio.run(evaluation.run(0))
    assert heard == [{"reward": 5.0, "easy": 2.5, "hard": 6.25, "place": 1.0, "bonus": 0.5}]


class Alternates(Asked):
    """Every second sample of a prompt of the set `hard` passes; all of `easy` do."""

    def __init__(self) -> None:
        super().__init__(PlusMinus())
        self._asked = Counter[int]()

    async def reward_of(self, prompt: Prompt) -> float:
        self._asked[prompt.id] += 1
        return float(prompt.source == "easy" or self._asked[prompt.id] % 2)


def test_several_samples_of_a_prompt_have_avg_and_pass_by_set(tmp_path: Path):
    metrics = MetricsLog(tmp_path)
    recorder = Recorder(metrics, PlainProgress(1, io.StringIO(), clock=lambda: 0.0), is_accuracy=False)
    prompts = [Prompt(0, "?", source="easy"), Prompt(1, "?", source="hard"), Prompt(2, "?", source="hard")]
    settings = EvalConfig(
        path=Path("heldout.jsonl"), n_samples_per_prompt=4, sampling=EvalSamplingConfig(temperature=1.0)
    )
    asyncio.run(Evaluation(settings, prompts, Alternates(), recorder, step_of=int).run(0))
    metrics.close()
    [record] = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    of_samples = {name.removeprefix("eval/"): value for name, value in record.items() if "_at_" in name}
    expected = {"easy": {"avg_at_4": 1.0, "pass_at_1": 1.0, "pass_at_2": 1.0, "pass_at_4": 1.0}}
    expected["hard"] = {"avg_at_4": 0.5, "pass_at_1": 0.5, "pass_at_2": 1 - 1 / 6, "pass_at_4": 1.0}
    both = {name: (value + 2 * expected["hard"][name]) / 3 for name, value in expected["easy"].items()}
    by_set = {f"{name}/{of}": value for of, values in expected.items() for name, value in values.items()}
    assert of_samples == pytest.approx(both | by_set)
    assert record["eval/reward"] == pytest.approx(both["avg_at_4"])


@pytest.mark.parametrize("before", [True, False])
def test_the_initial_policy_is_evaluated_once_unless_the_recipe_says_otherwise(before, tmp_path):
    settings = EvalConfig(path=Path("heldout.jsonl"), every=2, before_training=before)
    started = MetricsLog(tmp_path)
    started.log(0, {"run/recipe": "first start"})
    recorder = Recorder(started, PlainProgress(1, io.StringIO(), clock=lambda: 0.0), is_accuracy=False)
    evaluation = Evaluation(settings, PROMPTS, Asked(PlusMinus()), recorder, step_of=int)  # type: ignore[arg-type]
    assert evaluation.is_due_first(0, tmp_path) == before
    started.close()
    resumed = MetricsLog(tmp_path)
    resumed.log(0, {"run/recipe": "the first start has died before its first evaluation"})
    resumed.close()
    assert evaluation.is_due_first(0, tmp_path) == before
    assert not evaluation.is_due_first(3, tmp_path), "the policy is no longer the initial one"
    assert evaluation.is_due(2, 5), "evaluations during training stay"


def test_an_initial_policy_that_was_evaluated_is_not_evaluated_again(tmp_path):
    metrics = MetricsLog(tmp_path)
    recorder = Recorder(metrics, PlainProgress(1, io.StringIO(), clock=lambda: 0.0), is_accuracy=False)
    settings = EvalConfig(path=Path("heldout.jsonl"))
    evaluation = Evaluation(settings, PROMPTS, Asked(PlusMinus()), recorder, step_of=int)  # type: ignore[arg-type]
    asyncio.run(evaluation.run(0))
    metrics.flush()
    assert not evaluation.is_due_first(0, tmp_path)
    metrics.close()
    assert not evaluation.is_due_first(0, tmp_path), "a start without a checkpoint begins with it too"


def small_run(folder: Path, reward: Reward) -> tuple[RunSummary, list[str], list[dict]]:
    """Evaluate, train a step, evaluate. Return the summary, what is printed, and the metrics."""
    stream = io.StringIO()
    progress = PlainProgress(1, stream, clock=lambda: 0.0)
    metrics = MetricsLog(folder)
    recorder = Recorder(metrics, progress, is_accuracy=is_accuracy(reward))
    asked = Asked(reward)
    evaluation = Evaluation(EvalConfig(path=Path("heldout.jsonl")), PROMPTS, asked, recorder, step_of=int)
    status = RunStatus(0, 0, GroupCounts(), Counter(), dict.fromkeys(State, 0), 0, 0, 1, 0, 0, 0)

    async def course() -> None:
        await evaluation.run(0)
        recorder.training_begins(status)
        headers = [
            replace(trajectory(), metrics=(("calls", float(prompt.id)),))
            .judged(await asked.reward_of(prompt), parts_of(prompt))
            .header
            for prompt in PROMPTS
        ]
        report = PublishReport(1, bytes_sent=1, stall_s=0.1, total_s=0.2)
        trained = {"train/tokens": 8.0, "train/tflop": 1.0}
        times = StepTimes(wait_s=0.0, train_s=1.0, step_s=1.0)
        step = TrainedStep(headers, {0: 0}, 1, trained, report, times)
        recorder.step(step, replace(status, version=1, step=1))
        await evaluation.run(1)

    asyncio.run(course())
    summary = recorder.summary("done", replace(status, version=1, step=1))
    write_summary(folder, summary)
    print_summary(summary, stream, Path("runs/run"))
    progress.close()
    metrics.close()
    assert RunSummary.model_validate_json((folder / "summary.json").read_text()) == summary
    records = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return summary, stream.getvalue().splitlines(), records


@pytest.mark.parametrize(
    ("reward", "mean", "step", "row"),
    [
        (PlusMinus(), -0.5, "reward -0.500  held-out -0.500", "  reward      -0.500 -> -0.500  (+0)"),
        (OutOfTen(), 6.25, "reward  6.250  held-out  6.250", "  reward      6.250 -> 6.250  (+0)"),
        (
            Huge(),
            -1.5e308,
            "reward -1.5e+308  held-out -1.5e+308",
            "  reward      -1.5e+308 -> -1.5e+308  (+0)",
        ),
        (
            FinalAnswer(),
            1.0,
            "reward  1.000  accuracy 100.0%",
            "  accuracy    100.0% -> 100.0%  (+0.0 points)",
        ),
    ],
)
def test_a_run_ends_with_a_summary_whatever_its_rewards_are(tmp_path: Path, reward, mean, step, row):
    summary, lines, records = small_run(tmp_path, reward)
    assert summary.reward_before == summary.reward_after == pytest.approx(mean)
    accuracy = isinstance(reward, FinalAnswer)
    assert summary.reward_is_accuracy == accuracy
    assert [line for line in lines if step in line]
    assert row in lines
    assert any("accuracy" in line for line in lines) == accuracy
    evaluations = [record for record in records if "eval/response_length" in record]
    assert [record["eval/reward"] for record in evaluations] == pytest.approx([mean, mean])
    assert [record.get("eval/accuracy") for record in evaluations] == [1.0 if accuracy else None] * 2
    [trained] = [record for record in records if "reward/mean" in record]
    assert trained["reward/mean"] == pytest.approx(mean)
    assert (trained["reward/place"], trained["reward/bonus"]) == (1.5, 0.5), "means of those that have them"
    assert (trained["reward/place/min"], trained["reward/place/max"]) == (0.0, 3.0)
    calls = [trained[f"episode/calls{end}"] for end in ("", "/min", "/max")]
    assert calls == [1.5, 0.0, 3.0], "what workflows record is logged beside the parts of rewards"
    assert [each["eval/episode_calls"] for each in evaluations] == [1.5, 1.5]
    assert [(each["eval/reward_place"], each["eval/reward_bonus"]) for each in evaluations] == [
        (1.5, 0.5)
    ] * 2


def test_a_reward_is_an_accuracy_only_if_its_class_says_so():
    assert is_accuracy(FinalAnswer())
    assert not any(map(is_accuracy, (PlusMinus(), OutOfTen(), SimpleNamespace(is_accuracy="yes"))))  # type: ignore
