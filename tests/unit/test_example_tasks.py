"""The tasks in ``examples/tasks``: what their demonstrations show is what a run shows; their rewards."""

import asyncio
import json
import random
import re
from importlib import import_module
from itertools import islice
from types import ModuleType, SimpleNamespace

import pytest

from examples.tasks.countdown import countdown
from examples.tasks.extraction import extraction
from examples.tasks.hangman.hangman import Hangman
from examples.tasks.hangman.hangman import score as score_game
from examples.tasks.search import search
from examples.tasks.sorting import sorting
from slipstream.backend.quickstart.task import Message, Problem, Task, conversation, train_problems
from slipstream.backend.quickstart.tokenizer import UNKNOWN, build_tokenizer
from slipstream.backend.quickstart.warm_start import demonstrations, encoded
from slipstream.rollout.tokens.trajectory import Finish, Prompt
from slipstream.rollout.workflow.environment import Action, Environment, ToolEnvironment

NAMES = ("sorting", "extraction", "countdown", "hangman", "search")
MODULES = {name: import_module(f"examples.tasks.{name}.{name}") for name in NAMES}
TOOLS = {"countdown": "calc", "search": "find"}


def task_of(module: ModuleType) -> Task:
    return module.prepare.keywords["task"]


def shown(module: ModuleType, count: int = 400) -> list[tuple[Problem, list[Message]]]:
    """Problems and their demonstrations."""
    task, rng = task_of(module), random.Random(0)
    return [
        (each, task.demonstrate(each, rng)) for each in islice(train_problems(rng, 1.0, task.draw), count)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_vocabulary_holds_whatever_is_said(name):
    task = task_of(MODULES[name])
    tokenizer = build_tokenizer(task.symbols)
    unknown = tokenizer.convert_tokens_to_ids(UNKNOWN)
    for progress in (0.0, 0.3, 1.0):
        turns = encoded(tokenizer, demonstrations(random.Random(0), progress, task))
        assert len(turns) >= 64
        assert not any(unknown in before + said for before, said in turns)


def test_a_demonstration_without_an_answer_is_refused():
    silent = Task(sorting.draw, lambda problem, rng: [{"role": "user", "content": problem.prompt}])
    with pytest.raises(ValueError, match="has no message of the role `assistant`"):
        demonstrations(random.Random(0), 1.0, silent)


async def replayed(environment: Environment, problem: Problem, messages: list[Message]) -> list[float | None]:
    """Give the answers of a demonstration to an environment, which must say the same. Return its rewards."""
    said = await environment.reset(Prompt(0, problem.prompt, problem.label))
    begun = len(said)
    assert said == messages[:begun]
    rest, rewards = messages[begun:], []
    while rest:
        answer, *rest = rest
        assert answer["role"] == "assistant"
        step = await environment.step(Action(answer["content"], Finish.STOP))
        rewards.append(step.reward)
        reaction, rest = rest[:1], rest[1:]
        assert step.is_done == (not rest)
        if not step.is_done:
            assert [each["content"] for each in step.messages] == [each["content"] for each in reaction]
    return rewards


class Calls(ToolEnvironment):
    """Tools, with calls read without SGLang, which a test may not import here."""

    def __init__(self, path: str, system: str) -> None:
        super().__init__([path], parser="pythonic", system=system)
        read = r'\[(\w+)\((\w)="(.*)"\)\]'
        self._reader = SimpleNamespace(
            prepare=lambda: asyncio.sleep(0),
            calls_in=lambda text: [(n, json.dumps({k: v})) for n, k, v in re.findall(read, text)],
            numbers=lambda *_: ["one"],
            message=lambda *_: {},
        )


@pytest.mark.parametrize("name", TOOLS)
def test_the_tools_answer_as_demonstrations_show_it(name):
    tool = TOOLS[name]
    for problem, messages in shown(MODULES[name], 60):
        environment = Calls(f"examples.tasks.{name}.{name}.{tool}", tool)
        asyncio.run(replayed(environment, problem, messages))


def test_a_game_goes_as_demonstrations_show_it_and_is_won_by_its_last_hit():
    for problem, messages in shown(MODULES["hangman"], 100):
        rewards = asyncio.run(replayed(Hangman(), problem, messages))
        game = SimpleNamespace(turn_rewards=tuple(enumerate(rewards, 1)))
        is_won = "_" not in messages[-1]["content"]
        assert score_game(Prompt(0, problem.prompt), "", game) == is_won
        assert is_won or rewards.count(0.0) == 3


def test_a_guess_of_several_letters_is_a_miss():
    game = Hangman()
    asyncio.run(game.reset(Prompt(0, "b_", "ba")))
    assert asyncio.run(game.step(Action("ba", Finish.STOP))).reward == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_leave_room_to_learn_and_something_to_learn_from(name):
    """The reward of what a policy does that has learned the demonstrations by heart."""
    module, rewards = MODULES[name], []
    for problem, messages in shown(module):
        prompt, said = Prompt(0, problem.prompt, problem.label), messages[-1]["content"]
        if name == "hangman":
            rewards.append(float("_" not in said))
        elif hasattr(module, "score"):
            reward = module.score(prompt, said, None)
            rewards.append(reward if isinstance(reward, float) else reward["reward"])
        else:
            rewards.append(float(said == problem.label))
    assert 0.2 < sum(rewards) / len(rewards) < 0.7


@pytest.mark.parametrize(
    ("response", "reward", "parses"),
    [
        ('{"name":"anna","age":34,"city":"oslo"}', 1, 1),
        ('{"name":"anna","age":"34","city":"oslo"}', 2 / 3, 1),
        ('{"name":"anna"}', 1 / 3, 1),
        ('{"name":"anna","age":34,"city":"oslo"', 0, 0),
        ('{"name":anna,"age":34,"city":"oslo"}', 0, 0),
        ('["anna",34,"oslo"]', 0, 0),
        ("34", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_reward_of_an_extraction_is_the_share_of_its_right_fields(response, reward, parses):
    label = json.dumps({"name": "anna", "age": 34, "city": "oslo"})
    parts = extraction.score(Prompt(0, "", label), response, None)
    assert (parts["reward"], parts["parses"]) == (pytest.approx(reward), parses)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("14-5+2", 1),
        ("14-5-2", 0),
        ("14+2-5", 0),
        ("16-5+0", 0),
        ("11", 0),
        ('[calc(e="14-5+2")]', 0),
        ("", 0),
    ],
)
def test_an_answer_of_countdown_has_the_numbers_in_their_order_and_gives_the_target(response, reward):
    assert countdown.score(Prompt(0, "14 5 2 = 11"), response, None) == reward


@pytest.mark.parametrize(
    ("call", "said"), [("14-5+2 = 11", "yes"), ("14-5+2 = 12", "no"), ("14-5+2 = ", "no"), ("14-5+2", "no")]
)
def test_the_calculator_says_whether_a_try_has_the_target(call, said):
    assert asyncio.run(countdown.calc(call)) == said


@pytest.mark.parametrize("call", ["", "11", "14-5 = 9", "14*5+2 = 72", "11 = 14-5+2"])
def test_the_calculator_refuses_what_is_no_term(call):
    with pytest.raises(countdown.ToolError):
        asyncio.run(countdown.calc(call))


def test_the_targets_of_four_tries_differ():
    rng = random.Random(0)
    for _ in range(300):
        numbers = countdown.draw(rng, 1.0).prompt.partition(" = ")[0]
        values = [countdown.value_of(each) for each in countdown.tries(numbers)]
        assert len(set(values)) == 4 and all(0 <= value <= 30 for value in values)


def test_the_corpus_is_searched_by_words():
    person, city = next(iter(search.HOME.items()))
    assert asyncio.run(search.find(person)) == f"{person} lives in {city}"
    assert asyncio.run(search.find(city)) == f"{city} lies in {search.LAND[city]}"
    assert asyncio.run(search.find(f"lives {person}")) == f"{person} lives in {city}"
    with pytest.raises(search.ToolError):
        asyncio.run(search.find("zz"))


def test_sorting_is_in_the_order_of_the_alphabet():
    problem = sorting.draw(random.Random(0), 1.0)
    assert problem.label == "".join(each for each in sorting.ALPHABET if each in problem.prompt)
    assert conversation("a", "b")[1] == {"role": "assistant", "content": "b"}
