"""A rollout function gets the groups that are leased here, and what it returns are their episodes."""

import asyncio
import importlib
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.rollout.compat.slime import make_slime_importable
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.episode_samples import SampleError, WrongReturn, declared
from slipstream.rollout.compat.slime.function_calls import (
    CallSurroundings,
    FunctionCalls,
    FunctionFailed,
    SetEvaluation,
)
from slipstream.rollout.compat.slime.leased_groups import LeasedGroups, pop_first
from slipstream.rollout.compat.slime.rollout_calls import FunctionWorkflow, RolloutCalls, placed
from slipstream.rollout.compat.slime.sample_matching import LogprobsDiffer
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Completion, Finish, Prompt, Span
from slipstream.rollout.workflow import EpisodePlace, GroupRejected
from slipstream.rollout.workflow.endpoint import EndedEpisode, Reply

MODULE = "tests.unit.slime_rollout_functions"
SAMPLES, BATCH, VERSION = 2, 2, 5


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch):
    make_slime_importable()
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return importlib.import_module(MODULE)


class ScriptedEndpoint:
    """Answers every request with two tokens of the version that is served."""

    def __init__(self, functions, *, trained: bool = True) -> None:
        self.functions, self.trained = functions, trained
        self.version = VERSION
        self.names: list[ScriptedEndpoint] = []
        """What the key has named, one behind the other."""

    @asynccontextmanager
    async def open(self):
        replies: list[Reply] = []

        def ask(ids):
            count = len(replies)
            logprobs = (-0.1 * (count + 1), -0.2)
            completion = Completion((10, 11), logprobs, (Span(self.version, 0, 2),), Finish.STOP)
            replies.append(Reply(tuple(ids), completion))
            return [10, 11], list(logprobs)

        def renew(endpoint: ScriptedEndpoint) -> EndedEpisode:
            self.names.append(endpoint)
            ended = list(replies)
            replies.clear()
            return EndedEpisode(ended, []) if self.trained else EndedEpisode([], ended)

        async def work(awaitable):
            return await awaitable

        self.functions.ASK["episode:sk@127.0.0.1", 8001] = ask
        yield SimpleNamespace(base_url="http://127.0.0.1:8001", api_key="sk", run=work, renew=renew)


class World:
    def __init__(
        self,
        functions,
        name: str,
        *,
        limit_s: float = 60,
        patience_s: float = 60,
        buffer_filter=None,
        trained: bool = True,
        **args,
    ) -> None:
        self.arguments = SlimeArguments(
            rollout_batch_size=BATCH,
            over_sampling_batch_size=BATCH,
            n_samples_per_prompt=SAMPLES,
            apply_chat_template=False,
            **args,
        )
        self.endpoint = ScriptedEndpoint(functions, trained=trained)
        self.greedy = ScriptedEndpoint(functions)
        self.given_up: list[str] = []
        self.groups = LeasedGroups(
            self.arguments, buffer_filter or pop_first, prompts=9, patience_s=patience_s
        )
        self.limit = TimeLimit(limit_s)
        around = CallSurroundings(
            self.endpoint, self.greedy, self.limit, lambda: self.endpoint.version, self.given_up.append
        )
        self.calls = FunctionCalls(self.arguments, self.groups, around)
        path = f"{MODULE}.{name}"
        rollouts = RolloutCalls(path, self.calls, self.groups)
        self.workflow = FunctionWorkflow(rollouts, self.arguments, "score", lambda: self.endpoint.version)
        self.attested: set[int] = set()
        self.numbers: dict[tuple[int, int], dict[str, float]] = {}
        """What was recorded, by group and episode."""

    async def episode(self, group: int, sample: int, version: int = VERSION):
        generator = SimpleNamespace(attest=self.attested.update)
        recorded = self.numbers.setdefault((group, sample), {})
        context = SimpleNamespace(
            place=EpisodePlace(group, sample, version),
            generator=generator,
            tokenizer=None,
            metric=recorded.__setitem__,
        )
        prompt = Prompt(group, f"question {group}", "label", {})
        with self.limit():
            return await self.workflow.run(prompt, context)  # pyright: ignore

    async def group(self, group: int):
        return await asyncio.gather(
            *(self.episode(group, sample) for sample in range(SAMPLES)), return_exceptions=True
        )

    async def collect(self, *groups: int):
        async with asyncio.timeout(60):
            try:
                return await asyncio.gather(*map(self.group, groups))
            finally:
                await self.workflow.close()


@pytest.mark.parametrize("name", ["plain", "on_its_loop"])
def test_what_a_function_returns_are_the_episodes_of_its_groups(functions, name):
    async def check():
        world = World(functions, name)
        return world, await world.collect(7, 8, 9)

    world, groups = asyncio.run(check())
    for number, group in zip((7, 8, 9), groups, strict=True):
        for sample, [trajectory] in enumerate(group):
            assert trajectory.reward == number * SAMPLES + sample
            assert trajectory.versions_T.tolist() == [UNSAMPLED] * 3 + [VERSION] * 2
            assert trajectory.loss_mask_T.tolist() == [False] * 3 + [True] * 2
    assert world.attested == {VERSION}
    assert [call["groups"] for call in functions.CALLS] == [[7, 8], [9]], "a batch, and then what is left"
    assert [call["size"] for call in functions.CALLS] == [2, 1]
    ids = [call["rollout_id"] for call in functions.CALLS]
    assert ids == [VERSION, VERSION + 1], "ascending, and never behind the version"


def test_metrics_of_a_call_are_numbers_of_its_episodes(functions, capsys):
    async def check():
        world = World(functions, "with_metrics")
        await world.collect(7, 8, 9)
        return world.numbers

    numbers = asyncio.run(check())
    first, second = {"rollout.drops": 1.0, "time": 0.5}, {"rollout.drops": 2.0, "time": 0.5}
    assert numbers == {
        (group, sample): first if group < 9 else second for group in (7, 8, 9) for sample in range(SAMPLES)
    }
    said = capsys.readouterr().err
    assert said.count("the metric 'what' is not logged: str") == said.count("the metric 'none'") == 1


def test_metrics_of_another_form_are_a_failed_attempt(functions):
    async def check():
        return await World(functions, "with_a_list_of_metrics").collect(1)

    [group] = asyncio.run(check())
    assert all("returned metrics of type list" in str(each) for each in group)


def test_a_group_is_known_whatever_a_function_writes_into_it(functions):
    async def check():
        return await World(functions, "renumbers").collect(1, 2)

    groups = asyncio.run(check())
    assert [[trajectory.reward for [trajectory] in group] for group in groups] == [[2.0, 3.0], [4.0, 5.0]]


def test_what_was_sampled_once_is_trained_in_one_group_alone(functions):
    async def check():
        return await World(functions, "returns_copies").collect(1, 2)

    first, second = asyncio.run(check())
    assert [trajectory.reward for [trajectory] in first] == [2.0, 3.0]
    assert all(isinstance(each, LogprobsDiffer) for each in second), "its own replies have others"


def test_groups_that_a_function_drops_are_rejected(functions):
    async def check():
        return await World(functions, "drops_odd_ones").collect(1, 2)

    odd, even = asyncio.run(check())
    assert all(isinstance(each, GroupRejected) for each in odd)
    assert [trajectory.reward for [trajectory] in even] == [4.0, 5.0]


def test_groups_that_are_given_back_are_drawn_again_and_keep_what_was_sampled(functions):
    async def check():
        world = World(functions, "gives_back_first", buffer_filter=functions.lifo)
        return world, await world.collect(1, 2)

    _, groups = asyncio.run(check())
    assert [[trajectory.reward for [trajectory] in group] for group in groups] == [[2.0, 3.0], [4.0, 5.0]]
    calls = [call for call in functions.CALLS if "groups" in call]
    assert [call["groups"] for call in calls] == [[1, 2], [1]]
    assert {"filtered": [1], "rollout_id": None} in functions.CALLS


def test_lists_of_samples_are_siblings(functions):
    async def check():
        return await World(functions, "fans_out").collect(1)

    [group] = asyncio.run(check())
    assert [len(trajectories) for trajectories in group] == [2, 2]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("uneven", WrongReturn, "group of 1, expected 2"),
        ("no_lists", WrongReturn, "returned Sample, expected lists"),
        ("raises", FunctionFailed, "raised KeyError: 'answer_idx'"),
        ("asks_for_more", FunctionFailed, "holds 1 groups and asks for more.*max_head_offpolicyness"),
    ],
)
def test_a_function_that_breaks_its_contract_is_a_failed_attempt(functions, name, error, message):
    async def check():
        return await World(functions, name, patience_s=0.1).collect(1)

    [group] = asyncio.run(check())
    for failure in group:
        assert isinstance(failure, error)
        with pytest.raises(error, match=message):
            raise failure


def test_episodes_that_fail_may_be_tried_again(functions):
    async def check():
        world = World(functions, "raises")
        async with asyncio.timeout(60):
            failed = await world.group(1)
            again = await world.episode(1, 1)
        await world.workflow.close()
        return failed, again

    failed, again = asyncio.run(check())
    assert all(isinstance(each, FunctionFailed) for each in failed)
    assert again[0].reward == 3.0, "the same sample of the group, with a sibling that nobody waits for"


def test_a_function_that_does_not_return_ends_the_process(functions):
    async def check():
        world = World(functions, "hangs", limit_s=0.3)
        task = asyncio.create_task(world.group(1))
        async with asyncio.timeout(60):
            while not world.given_up:
                await asyncio.sleep(0.02)
        functions.RELEASE.set()
        task.cancel()
        await world.workflow.close()
        return world.given_up

    [reason] = asyncio.run(check())
    assert "rollout.episode_timeout_s" in reason
    assert "RELEASE.wait(60)" in reason


def test_a_cancelled_group_is_not_drawn(functions):
    async def check():
        world = World(functions, "plain")
        first = asyncio.create_task(world.group(1))
        second = asyncio.create_task(world.group(2))
        await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(60):
            await second
        await world.workflow.close()

    asyncio.run(check())
    assert [call["groups"] for call in functions.CALLS] == [[2]]


def test_samples_of_its_own_count_as_the_oldest_version_that_they_declare(functions):
    async def check(versions, **more):
        return await World(functions, "brings_its_own", their_versions=versions, **more).collect(1)

    [[[trajectory], _]] = asyncio.run(check([str(VERSION)]))
    assert trajectory.versions_T.tolist() == [UNSAMPLED] * 2 + [VERSION] * 2
    assert np.allclose(trajectory.logprobs_T, [0, 0, -0.5, -0.25])
    for versions in (["4"], ["6"], ["5", "4"], ["new"]):
        [[failure, _]] = asyncio.run(check(versions))
        assert isinstance(failure, SampleError), versions
    [[failure, _]] = asyncio.run(check([]))
    assert "no engine has sampled any" in str(failure)


def test_what_the_trainer_cannot_reproduce_is_not_trained_whatever_versions_it_has(functions):
    """Sampled here with parameters of its own: the versions of the engine's reply declare nothing."""

    async def check():
        world = World(functions, "plain", trained=False)
        original = functions.finished

        def with_versions(args, sample, number=0):
            sample = original(args, sample, number)
            sample.weight_versions = [str(VERSION)]
            return sample

        functions.finished = with_versions
        return await world.collect(1)

    [group] = asyncio.run(check())
    assert all(isinstance(each, SampleError) for each in group)


def test_declared_samples_need_log_probs(functions):
    sample = resolve("slime.utils.types.Sample")(tokens=[1, 2], response_length=1, weight_versions=["5"])
    with pytest.raises(SampleError, match="has no rollout_log_probs"):
        declared(sample, 5, 5, "reward")


@pytest.mark.parametrize("as_output", [True, False])
def test_an_eval_function_says_rewards_by_set(functions, as_output):
    async def check():
        values = {
            "eval_prompt_data": ["held_out", "held_out.jsonl"],
            "n_samples_per_eval_prompt": 1,
            "eval_temperature": 0.0,
            "eval_max_response_len": 8,
            "eval_top_p": 1.0,
            "eval_top_k": -1,
            **dict.fromkeys(("input_key", "label_key", "metadata_key"), "prompt"),
        }
        world = World(functions, "plain", as_output=as_output, **values)
        evaluation = SetEvaluation(f"{MODULE}.evaluates", world.calls, "score")
        nothing = SetEvaluation(f"{MODULE}.evaluates_nothing", world.calls, "score")
        with pytest.raises(WrongReturn, match="returned an empty dictionary"):
            await nothing.evaluate(3)
        sets, metrics = await evaluation.evaluate(3)
        assert metrics == ((("mine", 2.0),) if as_output else ())
        assert world.endpoint.names == [world.greedy, world.endpoint] * 2
        await world.calls.close()
        return sets

    first, second = asyncio.run(check())
    assert (first.name, first.rewards, first.lengths) == ("first_set", [1.0, 0.0], [2, 2])
    assert first.truncated == [False, True]
    assert (second.name, second.rewards, second.lengths, second.truncated) == ("second", [0.5], [0], [False])


def test_groups_without_a_number_take_the_places_of_dropped_ones():
    def group(number):
        return [SimpleNamespace(group_index=number)]

    stranger, known, again, excess = group(None), group(3), group(3), group(77)
    found = placed([stranger, known, again, excess], [2, 3])
    assert found == [(3, known), (2, stranger)]
    assert placed([known, again], [2, 3]) == [(3, known)], "nothing is trained twice"


def test_nothing_but_what_was_drawn_can_be_given_back(functions):
    groups = LeasedGroups(SlimeArguments(), pop_first, prompts=1, patience_s=1)
    groups.begin_call()
    with pytest.raises(ValueError, match="group_index 5, which this call has not drawn"):
        groups.add_samples([[SimpleNamespace(group_index=5)]])
