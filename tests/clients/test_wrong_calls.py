"""Calls that are wrong: clients get all that the policy says, and the conversation keeps its ids."""

import uuid

import anthropic
import openai
import pytest

from tests.clients.tools import TOOLS, WEATHER

SETTINGS = {"model": "m", "tools": TOOLS}
UNKNOWN = '<tool_call>\n{"name": "nope", "arguments": {"city": "Köln"}}\n</tool_call>'
RIGHT = UNKNOWN.replace("nope", "weather")
UNREADABLE = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"\n</tool_call>',
    "<tool_call>\n[5]\n</tool_call>",
    '<tool_call>\n{"arguments": {"city": "Köln"}}\n</tool_call>',
    f"{RIGHT}\n<tool_call>\nKöln\n</tool_call>",
    "Let me see.\n<tool_call>\nKöln",
)


def asked(text: str, chunk: int = 3) -> list:
    return [{"role": "user", "content": f"#chunk={chunk} #say {text}"}]


def answer_to(client, stream: bool, **settings) -> dict:
    if not stream:
        return client.chat.completions.create(**settings).choices[0].message.model_dump(exclude_none=True)
    with client.chat.completions.stream(**settings) as events:
        return events.get_final_completion().choices[0].message.model_dump(exclude_none=True)


@pytest.fixture
def client(gateway):
    # Equal conversations of other tests are other sessions.
    url = f"{gateway.url}/sessions/{uuid.uuid4().hex}/v1"
    with openai.OpenAI(base_url=url, api_key="key-anna", max_retries=0) as client:
        yield client


@pytest.fixture
def goes_on(client, gateway):
    """Repeat an answer with a reaction, and check that the next prompt repeats its ids."""

    def go_on(messages: list, answer: dict, *reaction: dict) -> None:
        client.chat.completions.create(messages=[*messages, answer, *reaction], **SETTINGS)
        recorded = gateway.recorded()
        last, before = sorted(recorded.turns)[-1], sorted(recorded.turns)[-2]
        assert recorded.continues(last) == before

    return go_on


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", ["", "I look.\n"])
def test_a_call_of_a_tool_that_does_not_exist_is_a_call(client, goes_on, stream, before):
    messages = asked(before + UNKNOWN)
    answer = answer_to(client, stream, messages=messages, **SETTINGS)
    [call] = answer["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("nope", '{"city": "Köln"}')
    assert answer["content"].strip() == before.strip()
    goes_on(messages, answer, {"role": "tool", "tool_call_id": call["id"], "content": "no such tool"})


@pytest.mark.parametrize("chunk", [1, 500])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", UNREADABLE)
def test_an_answer_with_a_call_that_cannot_be_read_stays_a_text(client, goes_on, stream, text, chunk):
    messages = asked(text, chunk)
    answer = answer_to(client, stream, messages=messages, **SETTINGS)
    assert answer["content"] == text and not answer.get("tool_calls")
    goes_on(messages, answer, {"role": "user", "content": "That call cannot be read."})


@pytest.mark.parametrize("stream", [False, True])
def test_text_after_a_call_is_not_lost(client, stream):
    answer = answer_to(client, stream, messages=asked(f"{RIGHT}\nThen I see."), **SETTINGS)
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["weather"]
    assert answer["content"].strip() == "Then I see."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [UNKNOWN, *UNREADABLE])
def test_other_protocols_lose_nothing_either(client, gateway, stream, text):
    settings = {"model": "m", "input": asked(text)[0]["content"], "tools": [WEATHER]}
    if stream:
        with client.responses.stream(**settings) as events:
            response = events.get_final_response()
    else:
        response = client.responses.create(**settings)
    called = [item.name for item in response.output if item.type == "function_call"]
    assert called == ["nope"] if text == UNKNOWN else response.output_text == text
    function = {"name": "weather", "input_schema": WEATHER["parameters"]}
    with anthropic.Anthropic(base_url=gateway.url, api_key="key-anna", max_retries=0) as claude:
        request = {"model": "m", "max_tokens": 500, "messages": asked(text), "tools": [function]}
        if stream:
            with claude.messages.stream(**request) as events:
                message = events.get_final_message()
        else:
            message = claude.messages.create(**request)
    used = [block.name for block in message.content if block.type == "tool_use"]
    said = "".join(block.text for block in message.content if block.type == "text")
    assert used == ["nope"] if text == UNKNOWN else said == text
