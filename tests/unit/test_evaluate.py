"""``slipstream eval``: scores of sets, against counts by hand, and inputs that cannot be used."""

import itertools
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from slipstream.backend.commands.evaluate import (
    evaluate,
    prompt_sets,
    score_of,
    with_sampling,
)
from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.backend.monitor.passes import pass_at, powers_to
from slipstream.configs.load import load_recipe
from slipstream.rollout.collection.collector.parts import evaluation_sampling
from slipstream.rollout.collection.collector.trial import TriedEpisode
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, Trajectory


def episode(prompt: int, reward: float | None, length: int = 2, finish: Finish = Finish.STOP) -> TriedEpisode:
    sampled = np.array([False] + [True] * length)
    trajectory = Trajectory(
        np.arange(length + 1),
        sampled,
        np.zeros(length + 1, np.float32),
        np.where(sampled, 0, UNSAMPLED).astype(np.int32),
        finish,
        reward=reward,
    )
    failures = () if reward is not None else ("Traceback: the reward raised KeyError",)
    return TriedEpisode(Prompt(prompt, "ask"), trajectory, failures, 0.0, 0.0)


@pytest.mark.parametrize(("samples", "passed"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 4), (6, 3)])
def test_pass_at_k_is_the_share_of_draws_with_a_sample_that_passes(samples, passed):
    outcomes = [True] * passed + [False] * (samples - passed)
    for k in range(1, samples + 1):
        draws = list(itertools.combinations(outcomes, k))
        assert pass_at(k, samples, passed) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_a_score_is_of_all_samples_and_its_error_of_prompts():
    rewards = [[1.0, 0.0, 0.5], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    episodes = [episode(n, reward, n + 1) for n, values in enumerate(rewards) for reward in values]
    episodes[-1] = episode(2, 1.0, 3, Finish.LENGTH)
    score = score_of("sums", episodes, 3)
    assert (score.prompts, score.samples) == (3, 3) and score.length == pytest.approx(2.0)
    assert score.mean == pytest.approx(0.5) and score.cut_off == pytest.approx(1 / 9)
    assert score.error == pytest.approx(statistics.stdev([0.5, 0.0, 1.0]) / 3**0.5)
    assert dict(score.passes) == pytest.approx({1: 4 / 9, 2: 5 / 9, 3: 2 / 3})


def test_a_failed_episode_is_no_score():
    with pytest.raises(Failed, match="sums: 1 of 2 episodes have failed\nprompt 1: Traceback: the reward"):
        score_of("sums", [episode(0, 1.0), episode(1, None)], 1)


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_k_goes_in_powers_of_two(samples, ks):
    assert powers_to(samples) == ks


@pytest.fixture
def recipe(tmp_path):
    return load_recipe_of(tmp_path)


def load_recipe_of(folder, *settings):
    (folder / "held.jsonl").write_text(json.dumps({"prompt": "ask", "label": "1"}) + "\n")
    return load_recipe(Path("quickstart"), [f"eval.path={folder / 'held.jsonl'}", *settings])


def test_sets_are_those_that_are_named_or_the_recipes_own(recipe, tmp_path):
    assert [len(prompts) for prompts in prompt_sets(recipe, []).values()] == [1]
    file = tmp_path / "held.jsonl"
    assert list(prompt_sets(recipe, [f"a={file}", f"b={file}"])) == ["a", "b"]


def test_every_wrong_set_is_told(recipe, tmp_path):
    file = tmp_path / "held.jsonl"
    with pytest.raises(WrongInput) as error:
        prompt_sets(recipe, ["plain", f"a={file}", f"a={file}", f"b={tmp_path / 'no.jsonl'}"])
    lines = str(error.value)
    assert "--set plain: expected NAME=FILE" in lines and "there is a set a already" in lines
    assert "--set b: " in lines and "no.jsonl" in lines


def test_equal_samples_are_refused(recipe):
    with pytest.raises(WrongInput, match="--samples 4 with --temperature 0"):
        evaluate(recipe, {}, 4, 0.0)


def test_the_sampling_is_that_of_evaluations(tmp_path):
    changed = with_sampling(load_recipe_of(tmp_path, "eval.sampling.max_new_tokens=9"), 0.5)
    assert (changed.rollout.sampling.max_new_tokens, changed.rollout.sampling.temperature) == (9, 0.5)
    assert changed.data is None and changed.eval is not None and changed.held_out_files == []
    assert evaluation_sampling(changed.eval, changed.rollout.sampling) == changed.rollout.sampling
    assert not changed.eval.sampling.is_greedy
