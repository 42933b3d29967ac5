"""Answers that begin with reasoning, in every protocol, and what becomes of it when a client repeats it."""

import anthropic
import openai
import pytest

from tests.clients.tools import CALLS, PARAMETERS, TOOLS

THOUGHT = "<think>\nI look.\n</think>\n\n"
MESSAGES = [{"role": "user", "content": f"#chunk=6 #say {THOUGHT}{CALLS}"}]


@pytest.fixture
def client(thinking):
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="key-anna", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_have_reasoning_beside_calls(client, thinking, stream):
    settings = {"model": "m", "messages": MESSAGES, "tools": TOOLS}
    if stream:
        chunks = [c for c in client.chat.completions.create(**settings, stream=True) if c.choices]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        names = [call.function.name for d in deltas for call in d.tool_calls or [] if call.function.name]
    else:
        answer = client.chat.completions.create(**settings)
        message = answer.choices[0].message
        reasoning, names = message.reasoning_content, [call.function.name for call in message.tool_calls]
        assert answer.usage.reasoning_tokens == len("\nI look.\n") + 2  # the marks are a token each
    assert reasoning.strip() == "I look."
    assert names == ["weather", "weather"]
    recorded = thinking.control()["answers"][-1]["message"]
    assert recorded["reasoning_content"].strip() == "I look."
    assert len(recorded["tool_calls"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_blocks_come_back_as_reasoning_and_not_as_text(thinking, stream):
    with anthropic.Anthropic(base_url=thinking.url, api_key="key-anna", max_retries=0) as client:
        settings = {
            "model": "m",
            "max_tokens": 900,
            "messages": MESSAGES,
            "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        }
        if stream:
            with client.messages.stream(**settings) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**settings)
        assert [block.type for block in message.content if block.type != "text"] == [
            "thinking",
            "tool_use",
            "tool_use",
        ]
        recorded = thinking.control()["answers"][-1]["message"]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "dry"}
            for block in message.content
            if block.type == "tool_use"
        ]
        client.messages.create(
            **settings
            | {
                "messages": [
                    *MESSAGES,
                    {"role": "assistant", "content": [block.model_dump() for block in message.content]},
                    {"role": "user", "content": results},
                ]
            }
        )
    repeated = thinking.control()["arrivals"][-1]["messages"][1]
    assert repeated["reasoning_content"] == recorded["reasoning_content"]
    assert repeated["content"] == recorded["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_reasoning_items(client, thinking, stream):
    if stream:
        with client.responses.stream(model="m", input=f"#say {THOUGHT}Done.") as events:
            answer = events.until_done().get_final_response()
    else:
        answer = client.responses.create(model="m", input=f"#say {THOUGHT}Done.")
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text.strip() == "Done."
    recorded = thinking.control()["answers"][-1]["message"]
    assert (recorded["reasoning_content"].strip(), recorded["content"].strip()) == ("I look.", "Done.")
    client.responses.create(model="m", input="again", previous_response_id=answer.id)
    messages = thinking.control()["arrivals"][-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["reasoning_content"] == recorded["reasoning_content"]
