"""Conversations as agents have them: what is recorded of each turn, and which ids the engine is given."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import anthropic
import httpx
import openai
import pytest

from tests.clients.tools import CALLS, PARAMETERS, TOOLS, WEATHER

ANNA = {"authorization": "Bearer key-anna"}
CHAT = "/v1/chat/completions"
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
THOUGHT = "<think>\nI look.\n</think>\n\n"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def eventually(condition) -> None:
    """Wait until something holds that another process does by itself."""
    waiting = threading.Event()
    for _ in range(3000):
        if condition():
            return
        waiting.wait(0.02)
    raise AssertionError("it never happened")


class CodingAgent:
    """An agent as Claude Code is one: it streams, counts its tokens before each turn, and repeats everything.

    The breakpoint of the cache moves to the newest message, and the attribution differs in each request.
    """

    def __init__(self, url: str, session: str, instructions: str) -> None:
        self._session = session
        self._instructions = instructions
        self.messages: list = []
        self.requests = 0
        self._client = anthropic.Anthropic(
            base_url=url,
            api_key="key-anna",
            max_retries=0,
            default_headers={
                "X-Session-Id": session,
                "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
                "x-app": "cli",
            },
        )

    def ask(self, blocks: list) -> list:
        """Say something, and return the blocks of the answer."""
        self.requests += 1
        for message in self.messages:
            for block in message["content"]:
                block.pop("cache_control", None)
        self.messages.append({"role": "user", "content": [dict(block) for block in blocks]})
        self.messages[-1]["content"][-1]["cache_control"] = EPHEMERAL
        settings = {
            "model": "claude-opus-4-6",
            "system": [
                {
                    "type": "text",
                    "text": f"x-anthropic-billing-header: cc_version=2; cch={self.requests:05x};",
                },
                {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
                {"type": "text", "text": self._instructions, "cache_control": EPHEMERAL},
            ],
            "tools": [{"name": "weather", "description": "The weather", "input_schema": PARAMETERS}],
            "messages": self.messages,
        }
        counted = self._client.beta.messages.count_tokens(**settings, betas=["effort-2025-11-24"])
        with self._client.beta.messages.stream(
            **settings,
            max_tokens=32_000,
            metadata={"user_id": f"user_0_account_1_session_{self._session}"},
            thinking={"type": "adaptive"},
            output_config={"effort": "medium"},
            extra_body={
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
            },
        ) as stream:
            message = stream.get_final_message()
        self.counted, self.used = counted.input_tokens, message.usage.input_tokens
        content = [block.model_dump(exclude_none=True) for block in message.content]
        # Blocks of blanks are not allowed in requests.
        said = [block for block in content if block["type"] != "text" or block["text"].strip()]
        self.messages.append({"role": "assistant", "content": said})
        return said


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def results(blocks: list, words: str) -> list:
    """Return a result for each call; the last one says what is answered."""
    calls = [block for block in blocks if block["type"] == "tool_use"]
    contents = ["dry"] * (len(calls) - 1) + [[text(words)]]
    return [
        {"type": "tool_result", "tool_use_id": call["id"], "content": content}
        for call, content in zip(calls, contents, strict=True)
    ]


def test_a_coding_agent_and_its_helper_have_a_branch_each_in_one_session(thinking):
    agent = CodingAgent(thinking.url, "code", "You write code.")
    helper = CodingAgent(thinking.url, "code", "You search. You write nothing.")
    said = agent.ask(
        [
            text("<system-reminder>\nToday is Monday.\n</system-reminder>"),
            text(f"What is the weather? #chunk=7 #say {THOUGHT}I look.\n{CALLS}"),
        ]
    )
    assert [block["type"] for block in said] == ["thinking", "text", "tool_use", "tool_use"]
    assert agent.counted == agent.used
    looked = helper.ask([text(f"Look it up #say {THOUGHT}{CALLS}")])
    second = agent.ask(results(said, f"#say {THOUGHT}It is dry."))
    helper.ask(results(looked, f"#say {THOUGHT}done"))
    agent.ask([text(f"thanks #say {THOUGHT}bye")])
    assert [block["type"] for block in second] == ["thinking", "text"]
    assert (agent.counted, helper.counted) == (agent.used, helper.used)

    recorded = thinking.recorded()
    numbers = [number for number, _ in recorded.of("code")]
    one, two, three, *_ = numbers
    assert [recorded.continues(number) for number in numbers] == [None, None, one, two, three]
    assert [recorded.turns[number]["reason"] for number in numbers] == ["", "new conversation", "", "", ""]
    assert all(turn["type"] == "main" for _, turn in recorded.of("code"))
    roles = {n: [m["role"] for m in messages] for n, messages in recorded.next_states.items() if n in numbers}
    assert roles == {one: ["tool", "tool"], two: ["tool", "tool"], three: ["user"]}
    assert recorded.turns[one]["messages"][0]["content"] == "You are an agent.\nYou write code."


def test_a_coding_agent_that_leaves_its_reasoning_out_goes_on_all_the_same(thinking):
    agent = CodingAgent(thinking.url, "forgetful", "You write code.")
    said = agent.ask([text(f"What is the weather? #say {THOUGHT}{CALLS}")])
    agent.messages[-1]["content"] = [block for block in said if block["type"] != "thinking"]
    agent.ask(results(said, f"#say {THOUGHT}It is dry."))
    recorded = thinking.recorded()
    first, second = (number for number, _ in recorded.of("forgetful"))
    assert recorded.continues(second) == first


@pytest.mark.parametrize("place", ["message", "result"])
def test_an_image_that_a_tool_reads_does_not_end_the_conversation(thinking, place):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    agent = CodingAgent(thinking.url, f"image-{place}", "You see.")
    agent.ask([text(f"#say {THOUGHT}{CALLS}")])
    calls = [block for block in agent.messages[-1]["content"] if block["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": call["id"], "content": "x"} for call in calls]
    seen = [image, text(f"#say {THOUGHT}I see.")]
    if place == "result":
        blocks[-1]["content"] = seen
    else:
        blocks += seen
    agent.ask(blocks)
    agent.ask([text(f"#say {THOUGHT}bye")])
    recorded = thinking.recorded()
    one, two, three = (number for number, _ in recorded.of(f"image-{place}"))
    assert [recorded.continues(number) for number in (two, three)] == [one, two]
    assert "[image]" in recorded.turns[two]["messages"][-1]["content"]


def test_an_agent_of_responses_goes_on_by_name_and_by_repeating_everything(thinking):
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="key-anna", max_retries=0) as client:
        question = [{"role": "user", "content": f"What is the weather? #say {THOUGHT}I look.\n{CALLS}"}]
        settings = {"model": "m", "tools": [WEATHER], "instructions": "Be brief."}
        first = client.responses.create(input=question, **settings)
        calls = [item for item in first.output if item.type == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": output}
            for call, output in zip(calls, ["dry", f"#say {THOUGHT}It is dry."], strict=True)
        ]
        second = client.responses.create(input=outputs, previous_response_id=first.id, **settings)
        items = [item.model_dump(exclude_none=True) for answer in (first, second) for item in answer.output]
        split = len(first.output)
        history = [*question, *items[:split], *outputs, *items[split:]]
        again = {"role": "user", "content": f"thanks #say {THOUGHT}bye"}
        with client.responses.stream(input=[*history, again], **settings) as events:
            third = events.until_done().get_final_response()
    assert third.output_text.strip() == "bye"
    assert first.session_id == second.session_id == third.session_id
    recorded = thinking.recorded()
    one, two, three = (number for number, _ in recorded.of(first.session_id))
    assert [recorded.continues(number) for number in (one, two, three)] == [None, one, two]
    assert [m["content"] for m in recorded.next_states[one]] == ["dry", f"#say {THOUGHT}It is dry."]
    assert [m["role"] for m in recorded.next_states[two]] == ["user"]


class OpenClaw:
    """A client as OpenClaw is configured for a server that trains: a bearer key, and keys in the body."""

    def __init__(self, url: str, session: str) -> None:
        self._http = httpx.Client(base_url=url, headers=ANNA, timeout=60)
        self._session = session
        self.messages: list = [{"role": "developer", "content": [text("You are Claw.")]}]

    def ask(self, message: dict, *, stream: bool = False, **more: object) -> dict:
        """Say something, and return the whole answer."""
        self.messages.append(message)
        body = {
            "model": "qwen3-8b",
            "messages": self.messages,
            "tools": TOOLS,
            "stream": stream,
            "store": False,
            "session_id": self._session,
            **more,
        }
        reply = self._http.post(CHAT, json=body)
        assert reply.status_code == 200, reply.text
        if not stream:
            answer = reply.json()
            assert answer["session_id"] == self._session
            said = answer["choices"][0]["message"]
        else:
            events = [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]
            assert {event["session_id"] for event in events} == {self._session}
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            said = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
        if more.get("turn_type") == "side":
            self.messages.pop()
        else:
            self.messages.append(
                {key: said[key] for key in ("role", "content", "tool_calls") if said.get(key)}
            )
        return said


def test_openclaw_works_with_a_changed_address_only(gateway):
    assert httpx.get(gateway.url + "/healthz").status_code == 200
    claw = OpenClaw(gateway.url, "claw")
    said = claw.ask({"role": "user", "content": [text(f"#say {CALLS}")]}, turn_type="main")
    calls = said["tool_calls"]
    claw.messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": [text("dry")]})
    last = {"role": "tool", "tool_call_id": calls[1]["id"], "content": [text("#say So be it.")]}
    claw.ask(last, stream=True, turn_type="main")
    claw.ask({"role": "user", "content": "Name this conversation #say Weather"}, turn_type="side")
    claw.ask({"role": "user", "content": "thanks #say bye"}, turn_type="main", session_done=True)

    recorded = gateway.recorded()
    one, two, side, three = (number for number, _ in recorded.of("claw"))
    assert [recorded.turns[number]["type"] for number in (one, two, side, three)] == [
        "main",
        "main",
        "side",
        "main",
    ]
    assert [recorded.continues(number) for number in (two, side, three)] == [one, two, two]
    assert not any(recorded.turns[number]["reason"] for number in (one, two, side, three))
    assert [m["role"] for m in recorded.next_states[one]] == ["tool", "tool"]
    assert recorded.next_states[two] == [{"role": "user", "content": "thanks #say bye"}]
    assert three not in recorded.next_states and "claw" in recorded.ended
    assert recorded.turns[one]["messages"][0] == {"role": "system", "content": "You are Claw."}


def test_a_session_of_300_turns_encodes_no_more_in_its_last_turns_than_in_its_first(thinking):
    messages: list = []
    encoded = [thinking.recorded().encoded]
    with httpx.Client(base_url=thinking.url, headers=ANNA, timeout=60) as http:
        for turn in range(300):
            messages.append({"role": "user", "content": f"{'a question ' * 5}#say {THOUGHT}answer {turn}"})
            body = {"messages": messages, "session_id": "long", "stream": bool(turn % 2)}
            reply = http.post(CHAT, json=body)
            assert reply.status_code == 200
            messages.append({"role": "assistant", "content": f"answer {turn}"})
            if turn % 100 == 99:
                encoded.append(thinking.recorded().encoded)
    parts = [after - before for before, after in pairwise(encoded)]
    assert max(parts) < 1.1 * min(parts), parts
    recorded = thinking.recorded()
    numbers = [number for number, _ in recorded.of("long")]
    assert [recorded.turns[number]["parent"] for number in numbers] == [None, *numbers[:-1]]
    assert recorded.continues(numbers[-1]) == numbers[-2]
    assert len(recorded.ids(numbers[-1])) > 300 * 50
    assert set(numbers[:-1]) <= recorded.next_states.keys()


def test_requests_that_race_in_one_session_get_their_own_answers_and_next_states(gateway):
    gateway.control(hold=True)
    first = [{"role": "user", "content": "#say go"}]

    def ask(http: httpx.Client, messages: list) -> dict:
        reply = http.post(CHAT, json={"messages": messages, "session_id": "race"})
        return reply.json()["choices"][0]["message"]

    with httpx.Client(base_url=gateway.url, headers=ANNA, timeout=60) as http, ThreadPoolExecutor(8) as pool:
        go = ask(http, first)
        questions = [{"role": "user", "content": f"#hold #say answer {place}"} for place in range(8)]
        asked = [pool.submit(ask, http, [*first, go, question]) for question in questions]
        eventually(lambda: gateway.control()["running"] == 8)
        gateway.control(release=True)
        answers = [each.result() for each in asked]
        assert [answer["content"] for answer in answers] == [f"answer {place}" for place in range(8)]
        thanks = [
            pool.submit(
                ask, http, [*first, go, question, answer, {"role": "user", "content": f"thanks {place}"}]
            )
            for place, (question, answer) in enumerate(zip(questions, answers, strict=True))
        ]
        for each in thanks:
            each.result()
    gateway.control(hold=True)
    recorded = gateway.recorded()
    [(root, _), *rest] = recorded.of("race")
    branches, ends = rest[:8], rest[8:]
    assert sorted(turn["answer"]["content"] for _, turn in branches) == [f"answer {i}" for i in range(8)]
    assert [recorded.continues(number) for number, _ in branches] == [root] * 8
    assert sorted(turn["reason"] for _, turn in branches) == ["", *["fork"] * 7], "one continues the branch"
    for number, turn in branches:
        place = turn["answer"]["content"].removeprefix("answer ")
        [end] = [each for each, ended in ends if ended["messages"][-1]["content"] == f"thanks {place}"]
        assert recorded.continues(end) == number
        assert recorded.next_states[number] == [{"role": "user", "content": f"thanks {place}"}]
    assert len(recorded.next_states[root]) == 1, "the first request to arrive is its next state"


def test_a_next_state_that_comes_before_the_answer_has_ended_waits_for_it(gateway):
    gateway.control(hold=True)
    question = {"role": "user", "content": "#hold #say A long answer"}
    correction = {"role": "user", "content": "stop, do this #say Well"}
    with httpx.Client(base_url=gateway.url, headers=ANNA, timeout=60) as http:
        body = {"messages": [question], "session_id": "early", "stream": True}
        with http.stream("POST", CHAT, json=body) as reply:
            lines = reply.iter_lines()
            read = ""
            while not read:
                line = next(lines)
                if line.startswith("data: {"):
                    read = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            messages = [question, {"role": "assistant", "content": read}, correction]
            other = http.post(CHAT, json={"messages": messages, "session_id": "early"})
            assert other.json()["choices"][0]["message"]["content"] == "Well"
            assert not set(gateway.recorded().next_states) & {n for n, _ in gateway.recorded().of("early")}
            gateway.control(release=True)
            assert "[DONE]" in "".join(lines)
    gateway.control(hold=True)
    recorded = gateway.recorded()
    by_answer = {turn["answer"]["content"]: number for number, turn in recorded.of("early")}
    assert by_answer.keys() == {"Well", "A long answer"}
    assert recorded.next_states[by_answer["A long answer"]] == [correction]
    assert recorded.turns[by_answer["Well"]]["reason"] == "unfinished"
    assert by_answer["Well"] not in recorded.next_states
