"""What rewards may return through a judge process: numbers, mappings of numbers, and a group's rewards."""

import asyncio
import re

import pytest

from slipstream.backend.monitor.tags import TAGS
from slipstream.rollout.reward.judge.judge_pool import JudgeStartFailed, JudgingFailed
from slipstream.rollout.reward.loading import EPISODES, GROUPS, check_judge, load_judge
from slipstream.rollout.reward.value import MOST_PARTS, RESERVED, Judgement, NoNumber, judgement_of
from slipstream.rollout.system.plugins import PluginError
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.judging import HANGS_S, TIMEOUT_S, Judging, trajectory

PROMPT = Prompt(5, "2+2?")


@pytest.fixture
def judging(tmp_path, monkeypatch) -> Judging:
    return Judging(tmp_path, monkeypatch)


def test_the_named_number_of_a_mapping_trains_and_the_others_are_parts():
    value = {"score": 1, "format": True, "length": 0.5, "why": "a text for logs"}
    assert judgement_of(value, "score") == Judgement(1.0, (("format", 1.0), ("length", 0.5)))


@pytest.mark.parametrize("value", [0.5, 1, True])
def test_a_number_needs_no_name(value):
    assert judgement_of(value, "score") == Judgement(float(value))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"acc": 1.0}, r"a mapping with the keys \['acc'\], expected 'score' among them: rollout.reward_key"),
        ({}, r"the keys \[\]"),
        ({"score": None}, "its value 'score': it returned None of type NoneType, expected a finite number"),
        ({"score": "1"}, "its value 'score': it returned '1' of type str"),
        ({"score": 1, "acc": float("nan")}, "its value 'acc': it returned nan"),
        ({"score": 1, "acc": None}, "its value 'acc': it returned None"),
        ({"score": 1, "a b": 1}, "the key 'a b', expected a name of at most 64 letters"),
        ({"score": 1, "": 1}, "the key ''"),
        ({"score": 1, "x" * 65: 1}, "expected a name of at most 64"),
        ({"score": 1, 7: 1}, "the key 7"),
        ({"score": 1, "mean": 1}, "the key 'mean', which names another metric"),
        ({"score": 1} | {f"n{i}": i for i in range(MOST_PARTS + 1)}, "33 further numbers, expected 32"),
        ([1.0], "type list"),
        (None, "type NoneType"),
    ],
)
def test_everything_else_is_no_reward_and_is_named(value, reason):
    with pytest.raises(NoNumber, match=reason):
        judgement_of(value, "score")


def test_no_part_takes_the_place_of_another_metric():
    assert {name.removeprefix("reward/") for name in TAGS if name.startswith("reward/")} == RESERVED
    taken = {name.removeprefix("eval/reward_") for name in TAGS if name.startswith("eval/reward_")}
    assert taken <= RESERVED
    with pytest.raises(NoNumber, match="names another metric"):
        judgement_of({"reward": 1.0, "source_math": 0.5}, "reward")


def ask_group(pool, *responses: str):
    return pool.score_group(PROMPT, list(responses), [trajectory() for _ in responses])


def test_a_mapping_travels_from_the_judge_process(judging):
    async def ask(pool):
        return await pool.score(PROMPT, "{'reward': 0.5, 'format': np.float32(1), 'why': 'x'}", trajectory())

    assert judging.use(judging.pool("Parts"), ask) == Judgement(0.5, (("format", 1.0),))


def test_scores_of_a_teacher_travel_from_the_judge_process_for_an_episode_and_for_a_group(judging):
    said = "Judgement(0.5, (('a', 1.0),), TeacherScores(np.array([np.nan] * 11 + [-1.5])))"

    async def ask(pool):
        return await pool.score(PROMPT, said, trajectory())

    async def ask_all(pool):
        return await ask_group(pool, f"return [1, {said}]", "b")

    single = judging.use(judging.pool("Parts"), ask)
    without, second = judging.use(judging.pool("Lengths"), ask_all)
    for judgement in (single, second):
        assert (judgement.reward, judgement.parts) == (0.5, (("a", 1.0),))
        assert judgement.teacher.logp_T[11] == -1.5
        assert judgement.teacher.has_T.sum() == 1
    assert without == Judgement(1.0)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Judgement(0.5, (), TeacherScores(np.zeros(3)))", "scores of 3 tokens, expected 12"),
        ("Judgement(0.5, (), [0.0] * 12)", "its teacher is of type list, expected TeacherScores"),
        ("Judgement(0.5, (), TeacherScores(np.full(12, np.inf)))", "expected finite numbers of at most 0"),
        ("Judgement(None)", "it returned None"),
        ("Judgement(0.5, [1])", "reward_parts are of type list"),
    ],
)
def test_a_judgement_that_is_none_is_a_failed_attempt(judging, said, reason):
    async def ask(pool):
        with pytest.raises(JudgingFailed, match=reason):
            await pool.score(PROMPT, said, trajectory())

    judging.use(judging.pool("Parts"), ask)


@pytest.mark.parametrize("reward", ["Lengths", "LengthsTogether"])
def test_a_group_is_one_question(judging, reward):
    async def ask(pool):
        assert pool.of_groups
        return await asyncio.gather(ask_group(pool, "aaa", "a", "aa"), ask_group(pool, "b"))

    three, single = judging.use(judging.pool(reward), ask)
    assert [each.reward for each in three] == [2, 0, 1]
    assert [dict(each.parts) for each in three] == [{"length": 3}, {"length": 1}, {"length": 2}]
    assert [each.reward for each in single] == [0]


def test_a_function_with_the_parameters_of_a_group_is_a_reward_of_groups(judging):
    async def ask(pool):
        return await ask_group(pool, "a", "b")

    assert judging.use(judging.pool("by_share", {"scale": 3}), ask) == [Judgement(1.5)] * 2


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("return [1]", "it returned 1 rewards for 2 episodes"),
        ("return 1", "of type int, expected a list of 2 rewards"),
        ("return None", "of type NoneType, expected a list of 2 rewards"),
        ("return [1, None]", "episode 1: it returned None"),
        ("return np.array([1, np.nan])", "episode 1: it returned nan"),
        ("return {'reward': 1}", "of type dict, expected a list"),
        ("sleeps", r"longer than 3 s \(rollout.judging.timeout_s\)"),
    ],
)
def test_a_group_without_a_number_for_each_episode_is_a_failed_attempt_of_the_whole(judging, said, reason):
    async def ask(pool):
        failed, other = await asyncio.gather(
            ask_group(pool, said, "b"), ask_group(pool, "b"), return_exceptions=True
        )
        assert isinstance(failed, JudgingFailed)
        assert re.search(reason, str(failed)) and "the group of prompt 5" in str(failed)
        return other

    pool = judging.pool("Lengths", timeout_s=HANGS_S if said == "sleeps" else TIMEOUT_S)
    assert [each.reward for each in judging.use(pool, ask)] == [0]


def test_a_group_is_asked_about_again(judging):
    async def ask(pool):
        return await ask_group(pool, "return [1, 2] if np.random.rand() < 0.7 else None", "b")

    pool = judging.pool("Lengths", attempts=30)
    assert [each.reward for each in judging.use(pool, ask)] == [1, 2]


def test_a_workflow_cannot_ask_a_reward_of_groups_about_a_single_trajectory(judging):
    async def ask(pool):
        with pytest.raises(JudgingFailed, match=r"judges whole groups \(`score_group`\): a workflow cannot"):
            await pool.score(PROMPT, "a", trajectory())

    judging.use(judging.pool("Lengths"), ask)


# ---- the shape of the code


HERE = "tests.unit.judge_rewards"


def test_the_method_or_the_parameters_say_what_is_judged():
    assert load_judge(f"{HERE}.Plain", {}).kind is EPISODES
    assert load_judge(f"{HERE}.by_length", {"limit": 3}).kind is EPISODES
    assert load_judge(f"{HERE}.Lengths", {}).kind is GROUPS
    assert load_judge(f"{HERE}.by_share", {}).kind is GROUPS


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("Both", {}, "has the methods `score` and `score_group`; expected one of them alone"),
        ("NoScore", {}, r"has no method `score` or `score_group`; .* or NoScore\(prompt, responses, traj"),
        ("Missing", {}, "judge_rewards has no 'Missing'"),
        ("by_other_names", {}, r"a function that judges is by_other_names\(prompt, response, traj"),
        ("HERE", {}, "judge_rewards has no 'HERE'"),
        ("FOREVER_S", {}, "it is of type int, expected a class"),
        ("Plain", {"scall": 1}, "`scall` is unknown: did you mean `scale`\\?"),
        ("by_share", {"scall": 1, "zzz": 2}, "`scall` is unknown: did you mean `scale`\\?; `zzz` is unknown"),
        ("ThreeArguments", {"limits": 1}, "`limits` is unknown: did you mean `limit`\\?; `scale` is missing"),
        (
            "ThreeArguments",
            {"scale": 1},
            r"`score\(prompt, response\)` cannot be called with \(prompt, response, trajectory\): too many",
        ),
    ],
)
def test_a_check_names_what_is_wrong_with_a_reward_without_constructing_it(name, args, reason):
    with pytest.raises(PluginError, match=reason):
        check_judge(f"{HERE}.{name}", args)


def test_a_check_accepts_what_can_be_loaded():
    for name in ("Plain", "Overlapping", "Lengths", "LengthsTogether", "by_length", "by_share", "Wrapped"):
        check_judge(f"{HERE}.{name}", {})


def test_a_method_with_too_few_parameters_is_refused_at_the_start(judging):
    (judging.temporary.parent / "two_of_three.py").write_text(
        "class Reward:\n    def score(self, prompt, response):\n        return 0.0\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(judging.temporary.parent)
        with pytest.raises(PluginError, match="cannot be called with"):
            load_judge("two_of_three.Reward", {})


def test_the_start_of_a_pool_says_what_is_wrong(judging):
    with pytest.raises(JudgeStartFailed, match="expected one of them alone"):
        judging.use(judging.pool("Both"), lambda pool: asyncio.sleep(0))
