"""Episodes of several turns: tokens as they were sampled, with loss once; tools, environments, limits."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collection.collector.judging import last_response
from slipstream.rollout.engine.context import InvalidRequest
from slipstream.rollout.system.plugins import PluginError
from slipstream.rollout.tokens.tokenizer import said
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Completion, Finish, Prompt, Span, Trajectory
from slipstream.rollout.workflow import Dialogue, MultiTurn, ToolUse, WorkflowContext
from slipstream.rollout.workflow.environment import Action, Step, ToolEnvironment, ToolError
from slipstream.rollout.workflow.environment.environment_pool import EnvironmentPool, ResetFailed
from tests.chat_model import APPENDING, REWRITING, build_tokenizer
from tests.environment import environment

pytestmark = pytest.mark.usefixtures("without_sglang")
PROMPT = Prompt(0, "What is 2 + 3?", label="5")
END = "<|im_end|>"


CALL = re.compile(r'<tool_call>\n\{"name": "(.*?)", "arguments": (.*)\}\n</tool_call>')


@pytest.fixture(scope="module")
def without_sglang():
    """Read calls without SGLang, which would change what this process can import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "slipstream.rollout.workflow.environment.tools.call_parser", lambda name, tools: CALL.findall
        )
        patch.setattr(
            "slipstream.rollout.workflow.environment.tools.parts_parser",
            lambda name, tools: lambda text: ("", CALL.sub("", text).strip()),
        )
        yield


@dataclass
class Scripted:
    """A generator that says what the script says, and keeps what it was asked."""

    tokenizer: Any
    answers: Sequence[str]
    asked: list[tuple[list[int], Completion]] = field(default_factory=list)
    context: int = 10**6
    """Largest number of tokens of a prompt and its completion."""

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        if len(input_ids) + sampling.max_new_tokens > self.context:
            room = max(0, self.context - len(input_ids))
            raise InvalidRequest("it exceeds the context", room=room)
        assert sampling.min_new_tokens <= sampling.max_new_tokens
        text = self.answers[len(self.asked)]
        ids = self.tokenizer.encode(text + END)[: sampling.max_new_tokens]
        finish = (
            Finish.STOP
            if len(ids) <= sampling.max_new_tokens and ids[-1:] == self.tokenizer.encode(END)
            else Finish.LENGTH
        )
        number = len(self.asked)
        logprobs = tuple(-0.25 * (place + 1) for place in range(len(ids)))
        completion = Completion(tuple(ids), logprobs, (Span(number, 0, len(ids)),), finish)
        self.asked.append((list(input_ids), completion))
        return completion


class NoReward:
    async def score(self, *_) -> float:
        raise AssertionError("nobody asks")


@pytest.fixture(scope="module", params=[APPENDING, REWRITING], ids=["appends", "removes"])
def tokenizer(request):
    return build_tokenizer(request.param)


def context(tokenizer, answers, most: int = 1000) -> tuple[WorkflowContext, Scripted]:
    generator = Scripted(tokenizer, answers)
    return WorkflowContext(generator, tokenizer, NoReward(), SamplingConfig(max_new_tokens=most)), generator


def check_tokens(trajectories: Sequence[Trajectory], generator: Scripted) -> None:
    """Every completion carries loss once, behind exactly the ids that were asked, and nothing else does."""
    left = dict(enumerate(generator.asked))
    for trajectory in trajectories:
        ids, mask_T = trajectory.tokens_T.tolist(), trajectory.loss_mask_T
        for version in sorted(set(trajectory.versions_T[mask_T].tolist())):
            asked, completion = left.pop(version)
            place_T = np.flatnonzero(mask_T & (trajectory.versions_T == version))
            start, end = place_T[0], place_T[-1] + 1
            assert ids[:start] == asked
            assert ids[start:end] == list(completion.tokens)
            assert trajectory.logprobs_T[start:end].tolist() == list(completion.logprobs)
        assert (trajectory.versions_T[~mask_T] == UNSAMPLED).all()
    assert not left


TEXTS = st.lists(
    st.sampled_from(["yes", "", "<think>\nhm\n</think>\n\nso", "ünï😀", "a\n\nb", " x "]),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(TEXTS, st.data())
def test_every_completion_carries_loss_once_behind_what_was_asked(tokenizer, texts, data):
    ctx, generator = context(tokenizer, texts)

    async def talk() -> list[Trajectory]:
        dialogue = Dialogue(ctx)
        messages = [{"role": "user", "content": "Hi"}]
        for number, _ in enumerate(texts):
            completion = await dialogue.complete(messages)
            content = dialogue.text(completion)
            match data.draw(st.sampled_from(["on", "on", "rewrite", "compact"])):
                case "on":
                    messages = [*messages, {"role": "assistant", "content": content}]
                case "rewrite":
                    messages = [*messages, {"role": "assistant", "content": "other"}]
                case _:
                    messages = [{"role": "user", "content": "so far: " + content}]
            messages = [*messages, {"role": "user", "content": f"and {number}?"}]
        return dialogue.trajectories()

    check_tokens(asyncio.run(talk()), generator)


def test_a_conversation_that_goes_on_is_one_trajectory():
    tokenizer = build_tokenizer(APPENDING)
    ctx, generator = context(tokenizer, ["one", "two", "three"])

    class Asks:
        async def reset(self, prompt: Prompt):
            self.turns = 0
            return prompt.messages()

        async def step(self, answer: Action) -> Step:
            self.turns += 1
            return Step(
                [{"role": "user", "content": "go on"}], reward=float(self.turns), is_done=self.turns == 3
            )

        async def close(self) -> None: ...

    globals()["Asks"] = Asks
    episode = asyncio.run(MultiTurn(f"{__name__}.Asks").run(PROMPT, ctx))
    assert not episode.siblings
    check_tokens([episode], generator)
    ends = np.flatnonzero(np.diff(episode.loss_mask_T.astype(int), append=0) == -1) + 1
    assert episode.turn_rewards == tuple(zip(ends.tolist(), (1.0, 2.0, 3.0), strict=True))


SPECIAL = ("<answer>", "</answer>", "<|obs|>", "<|eom|>", "<|call|>")


@pytest.mark.parametrize(
    ("sampled", "matched", "read"),
    [
        ("It is 5." + END, END, "It is 5."),
        ("It is 5.<|eom|>", "<|eom|>", "It is 5."),
        ("<search>France</search>", None, "<search>France</search>"),
        (call := "<tool_call>\n{}\n</tool_call>", None, call),
        ("<answer>5</answer>", None, "<answer>5</answer>"),
        ("<answer>5</answer>" + END, END, "<answer>5</answer>"),
        ("I look.<|obs|>", None, "I look.<|obs|>"),
        ("I look.<|obs|>", "text", "I look.<|obs|>"),
        ("It is 5." + END, "text", "It is 5."),
        ('to=add <|message|>{"a": 2}<|call|>', "<|call|>", 'to=add <|message|>{"a": 2}<|call|>'),
        (END, END, ""),
    ],
)
def test_what_is_said_is_read_without_the_end_of_the_turn_alone(sampled, matched, read):
    """``matched``: the token that has ended the answer; None, or "text": a stop text has, a part of the last
    token or all of it."""
    tokenizer = build_tokenizer(APPENDING)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(SPECIAL)}, replace_extra_special_tokens=False
    )
    ids = tokenizer.encode(sampled)
    stop = sampled[-5:] if matched is None else tokenizer.convert_tokens_to_ids(matched)
    if matched == "text":
        stop = tokenizer.decode(ids[-1:])
    n = len(ids)
    completion = Completion(tuple(ids), (-1.0,) * n, (Span(0, 0, n),), Finish.STOP, matched=stop)

    class Once:
        async def generate(self, *_) -> Completion:
            return completion

    class Notes:
        async def reset(self, prompt: Prompt):
            return prompt.messages()

        async def step(self, action: Action) -> Step:
            seen.append(action.text)
            return Step(is_done=True)

        async def close(self) -> None: ...

    seen: list[str] = []
    ctx = WorkflowContext(Once(), tokenizer, NoReward(), SamplingConfig())
    episode = asyncio.run(MultiTurn(Notes).run(PROMPT, ctx))
    assert seen == [read]
    stops = [stop] if isinstance(stop, str) else []
    assert last_response(tokenizer, episode, stops=stops) == read
    assert said(tokenizer, ids, Finish.LENGTH) == sampled


# ---- tools


async def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def fails(kind: str) -> str:
    if kind == "tool":
        raise ToolError("not today")
    if kind == "slow":
        await asyncio.sleep(60)
    raise RuntimeError("broken")


def blocking(a: int) -> int:
    return a


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tools(**settings) -> ToolEnvironment:
    """Tools whose episode has begun."""
    environment = ToolEnvironment([f"{__name__}.add", f"{__name__}.fails"], parser="qwen25", **settings)
    asyncio.run(environment.reset(PROMPT))
    return environment


@pytest.mark.parametrize(
    ("text", "results"),
    [
        (call("add", '{"a": 2, "b": 3}'), ["5"]),
        (call("add", '{"a": 2}') + "\n" + call("add", '{"a": 5, "b": 5}'), ["3", "10"]),
        (call("add", '{"b": 3}'), ["error: a: Field required"]),
        (call("add", '{"a": 2, "c": 3}'), ["error: c: Extra inputs are not permitted"]),
        (call("fails", '{"kind": "tool"}'), ["error: not today"]),
        (call("fails", '{"kind": "slow"}'), ["error: fails took longer than 0.05 s"]),
    ],
)
def test_results_of_calls_follow_the_answer(text, results):
    limit_s = 0.05 if '"slow"' in text else 60.0
    step = asyncio.run(tools(timeout_s=limit_s).step(Action(text, Finish.STOP)))
    assert not step.is_done
    assert [message["content"] for message in step.messages] == results
    assert len({message["tool_call_id"] for message in step.messages}) == len(results)


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ([("nope", "{}")], "error: there is no tool nope; there are add, fails"),
        ([("", "")], "error: a call cannot be read: "),
        ([("add", '{"a": 2}'), ("", "")], "3\nerror: a call cannot be read: "),
    ],
)
def test_a_wrong_call_is_said_to_the_policy(read, said, monkeypatch):
    environment = tools()
    monkeypatch.setattr(environment._reader, "_parser", lambda text: read)
    step = asyncio.run(environment.step(Action("a call", Finish.STOP)))
    assert not step.is_done and step.messages[0]["content"].startswith(said)


def test_a_call_that_was_cut_off_is_no_mistake(monkeypatch):
    environment = tools()
    monkeypatch.setattr(environment._reader, "_parser", lambda text: [("", "")])
    assert asyncio.run(environment.step(Action("a call", Finish.LENGTH))).is_done


CALLS_APART = APPENDING.replace(
    "{%- for message in messages %}",
    "{%- for message in messages %}{%- if '<tool_call>' in message.content %}"
    "{{ raise_exception('a call in the content') }}{%- endif %}",
)


@pytest.mark.parametrize("template", [APPENDING, CALLS_APART], ids=["text", "apart"])
def test_a_conversation_of_three_turns_with_tools_repeats_what_was_sampled(template):
    answers = [call("add", '{"a": 2, "b": 3}'), call("nope", '{"a": 1}'), "It is 5."]
    ctx, generator = context(build_tokenizer(template), answers)
    episode = asyncio.run(ToolUse([f"{__name__}.add"], parser="qwen25").run(PROMPT, ctx))
    assert len(generator.asked) == 3 and not episode.siblings
    check_tokens([episode], generator)
    assert "there is no tool nope" in ctx.tokenizer.decode(generator.asked[2][0])


def test_an_answer_without_a_call_ends_the_episode():
    assert asyncio.run(tools().step(Action("It is 5.", Finish.STOP))).is_done


def test_what_a_tool_raises_fails_the_attempt():
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(tools().step(Action(call("fails", '{"kind": "bug"}'), Finish.STOP)))


def test_too_many_calls_of_one_answer_are_refused():
    text = "\n".join([call("add", '{"a": 1}')] * 3)
    step = asyncio.run(tools(most_calls=2).step(Action(text, Finish.STOP)))
    assert [message["content"] for message in step.messages] == [
        "2",
        "2",
        "error: an answer may have 2 calls",
    ]


def test_a_tool_is_described_by_its_annotations():
    [schema, _] = tools().schemas
    assert schema["function"]["description"] == "Add two numbers."
    parameters = schema["function"]["parameters"]
    assert parameters["required"] == ["a"]
    assert {name: field["type"] for name, field in parameters["properties"].items()} == {
        "a": "integer",
        "b": "integer",
    }


@pytest.mark.parametrize(
    ("path", "reason"),
    [("blocking", "is not `async def`"), ("nothing", "has no 'nothing'")],
)
def test_what_cannot_be_a_tool_is_refused_at_once(path, reason):
    with pytest.raises((ValueError, ImportError), match=reason):
        ToolUse([f"{__name__}.{path}"], parser="qwen25")


PARSED = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
before = dict(os.environ), list(sys.path)
from slipstream.rollout.workflow import ToolUse
workflow = ToolUse(["tests.unit.test_multi_turn.add"], parser="qwen25")
print("sglang" in sys.modules)
from slipstream.rollout.workflow.environment.tools import call_parser
with ThreadPoolExecutor(8) as threads:
    list(threads.map(lambda _: call_parser("qwen25", []), range(8)))
print("sglang" in sys.modules, (dict(os.environ), list(sys.path)) == before)
parameters = {"type": "object", "properties": {}}
tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
for name, text in (
    ("qwen25", '<tool_call>\\n{"name": "add", "arguments": {"a": 2}}\\n</tool_call>'),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 2}}'),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]'),
    ("qwen25", "I add nothing."),
    ("qwen25", '<tool_call>\\n{"name": "nope", "arguments": {}}\\n</tool_call>'),
    ("llama3", '<|python_tag|>{"name": "nope", "parameters": {"a": 2}}'),
    ("qwen25", '<tool_call>\\n{"name": "add", "arguments": {"a": 2\\n</tool_call>'),
    ("llama3", '{"answer": 5}'),
    ("gpt-oss", '<|channel|>commentary to=functions.nope <|constrain|>json<|message|>{"a": 2}<|call|>'),
    ("gpt-oss", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2<|call|>'),
):
    print(call_parser(name, tools)(text))
try:
    call_parser("none", tools)
except ValueError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def parsed() -> list[str]:
    """What a process prints that makes a workflow, imports SGLang and reads calls with its parsers."""
    done = subprocess.run(
        [sys.executable, "-c", PARSED],
        env=environment(CUDA_VISIBLE_DEVICES="0,1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.splitlines()


def test_sglangs_parsers_read_calls_and_an_unknown_one_is_named_with_those_that_there_are(parsed):
    *calls, unknown = parsed[2:]
    assert calls == [
        *["[('add', '{\"a\": 2}')]"] * 3,
        "[]",
        "[('nope', '{}')]",
        "[('nope', '{\"a\": 2}')]",
        "[('', '')]",
        "[]",
        "[('nope', '{\"a\": 2}')]",
        "[('', '')]",
    ]
    assert unknown.startswith("there is no parser of tool calls 'none'; SGLang has ") and "qwen25" in unknown


def test_tokens_of_tools_carry_no_loss(tokenizer):
    answers = ["Let me see.\n" + call("add", '{"a": 2, "b": 3}'), "It is 5."]
    ctx, generator = context(tokenizer, answers)
    workflow = ToolUse([f"{__name__}.add"], parser="qwen25", system="Be brief.")
    episode = asyncio.run(workflow.run(PROMPT, ctx))
    check_tokens(episode.split(), generator)
    text = tokenizer.decode(episode.split()[-1].tokens_T.tolist())
    assert "Be brief." in text and "<tool_response>\n5\n</tool_response>" in text and '"name": "add"' in text


# ---- limits


@pytest.mark.parametrize("on_limit", ["train", "mask", "drop"])
@pytest.mark.parametrize("limit", [{"max_turns": 2}, {"max_tokens": 420}])
def test_an_episode_that_a_limit_ends_is_treated_as_asked(on_limit, limit):
    tokenizer = build_tokenizer(APPENDING)
    ctx, generator = context(tokenizer, [call("add", '{"a": 2}')] * 50)
    workflow = ToolUse([f"{__name__}.add"], parser="qwen25", on_limit=on_limit, **limit)
    episode = asyncio.run(workflow.run(PROMPT, ctx))
    assert episode.loss_mask_T.any() == (on_limit == "train")
    assert episode.is_dropped == (on_limit == "drop")
    assert episode.reward is None
    if "max_turns" in limit:
        assert len(generator.asked) == 2
    else:
        assert len(episode.tokens_T) <= 420


class Chats:
    """An environment that never ends an episode."""

    async def reset(self, prompt: Prompt):
        return prompt.messages()

    async def step(self, answer: Action) -> Step:
        return Step([{"role": "user", "content": "go on " * 5}])

    async def close(self) -> None: ...


@pytest.mark.parametrize("on_limit", ["train", "mask", "drop"])
@pytest.mark.parametrize("size", [200, 213, 241, 268, 300])
@pytest.mark.parametrize("least", [0, 90])
def test_a_conversation_that_fills_the_context_is_a_limit_and_no_error(on_limit, size, least):
    ctx, generator = context(build_tokenizer(APPENDING), ["fine"] * 50, most=100)
    ctx = replace(ctx, sampling=SamplingConfig(max_new_tokens=100, min_new_tokens=least))
    generator.context = size
    episode = asyncio.run(MultiTurn(Chats, max_turns=50, on_limit=on_limit).run(PROMPT, ctx))
    assert 1 < len(generator.asked) < 8 and len(episode.tokens_T) <= size
    assert episode.loss_mask_T.any() == (on_limit == "train")
    assert episode.is_dropped == (on_limit == "drop")
    assert size - len(episode.tokens_T) < 80  # no room for another question
    if on_limit == "train":
        check_tokens(episode.split(), generator)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_an_error():
    ctx, generator = context(build_tokenizer(APPENDING), ["fine"])
    generator.context = 20
    with pytest.raises(InvalidRequest):
        asyncio.run(MultiTurn(Chats).run(PROMPT, ctx))


def test_a_completion_that_is_cut_off_is_a_limit():
    ctx, _ = context(build_tokenizer(APPENDING), ["It is five, I think."], most=4)
    workflow = ToolUse([f"{__name__}.add"], parser="qwen25", on_limit="mask")
    assert not asyncio.run(workflow.run(PROMPT, ctx)).loss_mask_T.any()


def test_a_treatment_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="expected one of train, mask, drop"):
        ToolUse([f"{__name__}.add"], parser="qwen25", on_limit="ignore")


# ---- environments


class World:
    """An environment whose resets follow a script."""

    made = 0
    closed = 0
    script: Sequence[str] = ()
    resets = 0
    open = most_open = 0

    def __init__(self) -> None:
        World.made += 1

    async def reset(self, prompt: Prompt):
        World.resets += 1
        what = World.script[World.resets - 1] if World.resets <= len(World.script) else "ok"
        if what == "hang":
            await asyncio.sleep(60)
        if what == "raise":
            raise OSError("no world")
        World.open += 1
        World.most_open = max(World.most_open, World.open)
        return prompt.messages()

    async def step(self, answer: Action) -> Step:
        return Step(is_done=True)

    async def close(self) -> None:
        World.closed += 1


@pytest.fixture
def world():
    World.made = World.closed = World.resets = World.open = World.most_open = 0
    World.script = ()
    return World


async def episode(pool: EnvironmentPool, error: Exception | None = None) -> None:
    async with pool.begun(PROMPT):
        await asyncio.sleep(0)
        World.open -= 1
        if error is not None:
            raise error


def test_no_more_environments_than_the_limit_are_open_and_each_is_used_again(world):
    async def run() -> None:
        pool = EnvironmentPool(world, limit=3)
        await asyncio.gather(*(episode(pool) for _ in range(20)))
        await pool.close()

    asyncio.run(run())
    assert world.most_open == world.made == world.closed == 3


def test_a_reset_that_hangs_or_raises_is_tried_again_in_a_new_environment(world):
    world.script = ["hang", "raise", "ok"]

    async def run() -> None:
        pool = EnvironmentPool(world, reset_timeout_s=0.05)
        await episode(pool)
        await pool.close()

    asyncio.run(run())
    assert (world.made, world.closed) == (3, 3)


@pytest.mark.parametrize(("what", "reason"), [("hang", "took too long"), ("raise", "OSError: no world")])
def test_resets_that_all_fail_say_why_and_leave_nothing_open(world, what, reason):
    world.script = [what] * 9
    pool = EnvironmentPool(world, reset_timeout_s=0.05, reset_attempts=2, limit=1)
    with pytest.raises(ResetFailed, match=f"2 attempts of 0.05 s; the last one: {reason}"):
        asyncio.run(episode(pool))
    assert (world.made, world.closed) == (2, 2)


def test_an_environment_whose_episode_has_failed_is_closed(world):
    async def run() -> None:
        pool = EnvironmentPool(world)
        with pytest.raises(RuntimeError):
            await episode(pool, RuntimeError("no"))
        await episode(pool)

    asyncio.run(run())
    assert (world.made, world.closed) == (2, 1)


def test_a_cancelled_reset_closes_its_environment_and_gives_its_place_back(world):
    world.script = ["hang"]

    async def run() -> None:
        pool = EnvironmentPool(world, limit=1)
        task = asyncio.create_task(episode(pool))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await episode(pool)

    asyncio.run(run())
    assert (world.made, world.closed) == (2, 1)


def test_a_workflow_makes_no_environment_before_an_episode_and_closes_all_at_its_end(world):
    workflow = MultiTurn(f"{__name__}.World")
    assert world.made == 0
    ctx, _ = context(build_tokenizer(APPENDING), ["a", "b"])

    async def run() -> None:
        await workflow.run(PROMPT, ctx)
        await workflow.close()

    asyncio.run(run())
    assert (world.made, world.closed) == (1, 1)


def test_sglang_is_imported_for_episodes_only_and_changes_nothing_for_other_processes(parsed):
    """The driver makes the workflow as well, and what it starts must see its GPUs."""
    assert parsed[:2] == ["False", "True True"]


def test_arguments_that_do_not_fit_are_known_when_the_workflow_is_made():
    with pytest.raises(PluginError, match="`size` is unknown"):
        MultiTurn({"path": f"{__name__}.World", "args": {"size": 3}})
    with pytest.raises(ValueError, match="name"):
        MultiTurn({"name": f"{__name__}.World"})


def test_results_that_are_no_text_are_json():
    assert (
        json.loads(
            asyncio.run(tools().step(Action(call("add", '{"a": 1}'), Finish.STOP))).messages[0]["content"]
        )
        == 2
    )
