"""Wishes, tools and contents as agents send them to a policy that neither reasons nor sees."""

import json
import re

import anthropic
import openai
import pytest

from tests.clients.tools import CALLS, PARAMETERS, TOOLS, WEATHER
from tests.gateway_process import GatewayProcess

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ANNA = {"authorization": "Bearer key-anna"}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
DROPPED = "x-slipstream-dropped-tools"


def body(path: str, said: str = "#say Hello", **more) -> dict:
    if path == RESPONSES:
        return {"model": "m", "input": [{"role": "user", "content": said}], **more}
    given = {"model": "m", "messages": [{"role": "user", "content": said}], **more}
    return {"max_tokens": 64, **given} if path == MESSAGES else given


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def figure(gateway, name: str, label: str) -> float:
    text = gateway.http.get("/metrics", headers=ANNA).text
    found = re.findall(rf'slipstream_gateway_{name}_total{{\w+="{re.escape(label)}"}} ([\d.]+)', text)
    return float(found[0]) if found else 0.0


def prompt_of(gateway) -> str:
    return gateway.control()["arrivals"][-1]["text"]


WISHES = [
    (MESSAGES, "thinking", {"thinking": {"type": "adaptive"}}),
    (MESSAGES, "thinking", {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
    (MESSAGES, "thinking", {"thinking": {"type": "enabled", "budget_tokens": 1}}),
    (MESSAGES, "thinking", {"thinking": {"type": "of 2031"}}),
    (MESSAGES, "output_config.effort", {"output_config": {"effort": "high"}}),
    (MESSAGES, "output_config.task_budget", {"output_config": {"task_budget": {"type": "tokens"}}}),
    (MESSAGES, "service_tier", {"service_tier": "fast"}),
    (MESSAGES, "context_management", {"context_management": {"edits": []}}),
    (MESSAGES, "cache_control", {"cache_control": {"type": "ephemeral"}}),
    (MESSAGES, "cache_control", {"system": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}),
    (MESSAGES, "speed", {"speed": "fast"}),
    (CHAT, "reasoning_effort", {"reasoning_effort": "high"}),
    (CHAT, "reasoning_effort", {"reasoning_effort": "of 2031"}),
    (CHAT, "reasoning", {"reasoning": {"effort": "of 2031"}}),
    (CHAT, "thinking", {"thinking": {"type": "enabled"}}),
    (CHAT, "enable_thinking", {"enable_thinking": True}),
    (CHAT, "verbosity", {"verbosity": "high"}),
    (CHAT, "service_tier", {"service_tier": "of 2031"}),
    (CHAT, "prompt_cache_key", {"prompt_cache_key": "k"}),
    (CHAT, "store", {"store": True}),
    (CHAT, "tool_choice", {"tools": TOOLS, "tool_choice": {"type": "web_search"}}),
    (RESPONSES, "reasoning", {"reasoning": {"effort": "medium", "summary": "auto"}}),
    (RESPONSES, "reasoning", {"reasoning": {"effort": "of 2031"}}),
    (RESPONSES, "text.verbosity", {"text": {"verbosity": "of 2031"}}),
    (RESPONSES, "service_tier", {"service_tier": "of 2031"}),
    (RESPONSES, "truncation", {"truncation": "auto"}),
    (RESPONSES, "include", {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]}),
    (RESPONSES, "client_metadata", {"client_metadata": {"a": "b"}}),
]


@pytest.mark.parametrize(("path", "wish", "more"), WISHES, ids=str)
def test_a_wish_that_the_policy_cannot_grant_is_ignored_and_counted(gateway, path, wish, more):
    before = figure(gateway, "wishes_ignored", wish)
    reply = gateway.http.post(path, json=body(path, **more), headers=ANNA)
    assert reply.status_code == 200, reply.text
    assert "Hello" in reply.text
    assert figure(gateway, "wishes_ignored", wish) == before + 1


@pytest.mark.parametrize(("path", "wish", "more"), WISHES, ids=str)
def test_a_policy_that_reasons_is_asked_with_the_same_wishes(thinking, path, wish, more):
    reply = thinking.http.post(path, json=body(path, **more), headers=ANNA)
    assert reply.status_code == 200, reply.text


def test_what_is_no_wish_at_all_is_still_refused(gateway):
    for path, more in (
        (MESSAGES, {"thinking": 5}),
        (CHAT, {"reasoning_effort": []}),
        (RESPONSES, {"text": 7}),
        (RESPONSES, {"include": 3}),
    ):
        assert gateway.http.post(path, json=body(path, **more), headers=ANNA).status_code == 400, more


# ---- tools


HOSTED = [
    (RESPONSES, "web_search", [{"type": "web_search"}]),
    (RESPONSES, "web_search_preview_2025_03_11", [{"type": "web_search_preview_2025_03_11"}]),
    (RESPONSES, "image_generation", [{"type": "image_generation", "quality": "low"}]),
    (RESPONSES, "code_interpreter", [{"type": "code_interpreter", "container": {"type": "auto"}}]),
    (RESPONSES, "file_search", [{"type": "file_search", "vector_store_ids": ["v"]}]),
    (RESPONSES, "mcp", [{"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:1"}]),
    (RESPONSES, "tool_search", [{"type": "tool_search"}]),
    (RESPONSES, "shell", [{"type": "shell", "environment": {"type": "container_auto"}}]),
    (RESPONSES, "of_2031", [{"type": "of_2031"}]),
    (MESSAGES, "web_search_20250305", [{"type": "web_search_20250305", "name": "web_search"}]),
    (MESSAGES, "web_fetch_20250910", [{"type": "web_fetch_20250910", "name": "web_fetch"}]),
    (MESSAGES, "code_execution_20250825", [{"type": "code_execution_20250825", "name": "code_execution"}]),
    (MESSAGES, "mcp_toolset", [{"type": "mcp_toolset", "mcp_server_name": "x"}]),
    (CHAT, "web_search", [{"type": "web_search", "web_search": {"enable": True}}]),
    (CHAT, "code_interpreter", [{"type": "code_interpreter"}]),
]
OWN = {
    RESPONSES: WEATHER,
    MESSAGES: {"name": "weather", "input_schema": PARAMETERS},
    CHAT: TOOLS[0],
}


@pytest.mark.parametrize(("path", "kind", "tools"), HOSTED, ids=str)
@pytest.mark.parametrize("beside", [False, True])
def test_a_tool_of_the_provider_is_left_out_and_named(gateway, path, kind, tools, beside):
    offered = [*tools, OWN[path]] if beside else tools
    reply = gateway.http.post(path, json=body(path, tools=offered), headers=ANNA)
    assert reply.status_code == 200, reply.text
    assert reply.headers[DROPPED] == kind
    assert kind not in prompt_of(gateway) and ("weather" in prompt_of(gateway)) == beside


def test_a_stream_names_the_tools_that_were_left_out_and_the_metrics_count_them(gateway):
    before = figure(gateway, "tools_dropped", "web_search")
    tools = [{"type": "web_search"}, {"type": "mcp"}, WEATHER]
    reply = gateway.http.post(RESPONSES, json=body(RESPONSES, tools=tools, stream=True), headers=ANNA)
    assert reply.headers[DROPPED] == "web_search, mcp" and "response.completed" in reply.text
    assert figure(gateway, "tools_dropped", "web_search") == before + 1


@pytest.mark.parametrize(
    ("path", "tools", "choice"),
    [
        (RESPONSES, [{"type": "web_search"}], "required"),
        (RESPONSES, [{"type": "web_search"}], {"type": "web_search"}),
        (MESSAGES, [{"type": "web_search_20250305", "name": "web_search"}], {"type": "any"}),
        (
            MESSAGES,
            [{"type": "web_search_20250305", "name": "web_search"}, OWN[MESSAGES]],
            {"type": "tool", "name": "web_search"},
        ),
    ],
)
def test_the_choice_of_a_tool_that_was_left_out_is_no_reason_to_refuse(gateway, path, tools, choice):
    reply = gateway.http.post(path, json=body(path, tools=tools, tool_choice=choice), headers=ANNA)
    assert reply.status_code == 200, reply.text


CLIENTS_OWN = [
    ({"type": "bash_20250124", "name": "bash"}, "bash", {"command": "ls"}),
    (
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        "str_replace_based_edit_tool",
        {"command": "view", "path": "/a"},
    ),
    (
        {"type": "text_editor_20241022", "name": "str_replace_editor"},
        "str_replace_editor",
        {"command": "create", "path": "/a", "file_text": "x"},
    ),
    ({"type": "memory_20250818", "name": "memory"}, "memory", {"command": "view", "path": "/memories"}),
    (
        {"type": "computer_20250124", "name": "computer", "display_width_px": 640, "display_height_px": 480},
        "computer",
        {"action": "screenshot"},
    ),
]


@pytest.mark.parametrize(("tool", "name", "arguments"), CLIENTS_OWN, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_anthropics_clients_run_has_a_schema_and_its_calls_come_back(
    gateway, tool, name, arguments, stream
):
    with anthropic.Anthropic(base_url=gateway.url, api_key="key-anna", max_retries=0) as client:
        settings = body(MESSAGES, f"#say {call(name, **arguments)}", tools=[tool], max_tokens=400)
        if stream:
            with client.beta.messages.stream(**settings) as events:
                message = events.get_final_message()
        else:
            message = client.beta.messages.create(**settings)
    assert [(block.name, block.input) for block in message.content if block.type == "tool_use"] == [
        (name, arguments)
    ]
    prompt = prompt_of(gateway)
    assert f'"name": "{name}"' in prompt and f'"{next(iter(arguments))}"' in prompt


ITEMS = [
    (
        {"type": "local_shell"},
        call("local_shell", command=["ls"]),
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "output": "dry"},
    ),
    (
        {"type": "shell", "environment": {"type": "local"}},
        call("shell", commands=["ls"]),
        {"type": "shell_call", "action": {"commands": ["ls"]}},
        {
            "type": "shell_call_output",
            "output": [{"stdout": "dry", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
    ),
    (
        {"type": "apply_patch"},
        call("apply_patch", type="delete_file", path="a"),
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "status": "completed", "output": "dry"},
    ),
    (
        {"type": "computer_use_preview", "display_width": 9, "display_height": 9, "environment": "linux"},
        call("computer", type="screenshot"),
        {"type": "computer_call", "action": {"type": "screenshot"}},
        {
            "type": "computer_call_output",
            "output": {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{PIXEL}"},
        },
    ),
    (
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": PARAMETERS},
        call("tool_search", city="Rom"),
        {"type": "tool_search_call", "execution": "client", "arguments": {"city": "Rom"}},
        {"type": "tool_search_output", "execution": "client", "tools": [WEATHER]},
    ),
    (
        {"type": "namespace", "name": "sky", "description": "d", "tools": [WEATHER]},
        call("sky__weather", city="Rom"),
        {"type": "function_call", "name": "weather", "namespace": "sky"},
        {"type": "function_call_output", "output": "dry"},
    ),
    (
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
        call("patch", input="x"),
        {"type": "custom_tool_call", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "output": "dry"},
    ),
]


@pytest.mark.parametrize(("tool", "said", "expected", "output"), ITEMS, ids=lambda v: str(v)[:24])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_tool_that_clients_of_responses_run_comes_back_in_its_form_and_goes_on(
    gateway, tool, said, expected, output, stream, by_name
):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="key-anna", max_retries=0) as client:
        question = {"role": "user", "content": f"#say {said}"}
        settings = {
            "model": "m",
            "tools": [tool],
            "extra_headers": {"x-session-id": f"{tool}{stream}{by_name}"},
        }
        if stream:
            events = list(client.responses.create(input=[question], stream=True, **settings))
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert "response.output_item.added" in [event.type for event in events]
            [done] = [event for event in events if event.type == "response.output_item.done"]
            first = events[-1].response
            assert done.item.to_dict() == first.output[0].to_dict()
        else:
            first = client.responses.create(input=[question], **settings)
        [item] = [one.to_dict() for one in first.output]
        assert expected.items() <= item.items()
        assert client.responses.retrieve(first.id).output[0].to_dict() == item
        answered = {**output, "call_id": item["call_id"]}
        if by_name:
            client.responses.create(input=[answered], previous_response_id=first.id, **settings)
        else:
            client.responses.create(input=[question, item, answered], **settings)
    recorded = gateway.recorded()
    *_, one, two = recorded.of(first.session_id)
    assert recorded.continues(two[0]) == one[0], "the call is repeated as the policy has written it"
    shown = gateway.control()["arrivals"][-1]["messages"][-1]["content"]
    assert "dry" in shown or "[image]" in shown or "weather" in shown


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_of_a_chat_comes_back_as_free_text_and_goes_on(gateway, stream):
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: WORD"}}
    tool = {"type": "custom", "custom": {"name": "patch", "description": "Patches.", "format": grammar}}
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="key-anna", max_retries=0) as client:
        said = call("patch", input="*** Begin")
        question = {"role": "user", "content": f"#say {said}"}
        settings = {"model": "m", "tools": [tool, TOOLS[0]], "extra_headers": {"x-session-id": f"c{stream}"}}
        if stream:
            chunks = list(client.chat.completions.create(messages=[question], stream=True, **settings))
            [made] = [one for c in chunks if c.choices for one in c.choices[0].delta.tool_calls or []]
        else:
            [made] = (
                client.chat.completions.create(messages=[question], **settings).choices[0].message.tool_calls
            )
        made = made.to_dict()
        made.pop("index", None)
        assert (made["type"], made["custom"]) == ("custom", {"name": "patch", "input": "*** Begin"})
        result = {"role": "tool", "tool_call_id": made["id"], "content": "dry"}
        answer = {"role": "assistant", "content": "", "tool_calls": [made]}
        client.chat.completions.create(messages=[question, answer, result], **settings)
    recorded = gateway.recorded()
    one, two = (number for number, _ in recorded.of(f"c{stream}"))
    assert recorded.continues(two) == one
    assert "start: WORD" in prompt_of(gateway)


# ---- contents


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
CONTENTS = [
    (MESSAGES, IMAGE, "[image]"),
    (MESSAGES, {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}, "[image]"),
    (
        MESSAGES,
        {"type": "document", "title": "a.pdf", "source": {"type": "base64", "data": "JVBE"}},
        "[document: a.pdf]",
    ),
    (
        MESSAGES,
        {"type": "document", "title": "n", "source": {"type": "text", "data": "Dry."}},
        "[document: n]\nDry.",
    ),
    (MESSAGES, {"type": "container_upload", "file_id": "f"}, "[document]"),
    (MESSAGES, {"type": "of_2031"}, "[of_2031]"),
    (CHAT, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}, "[image]"),
    (CHAT, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}, "[image]"),
    (CHAT, {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "[audio]"),
    (CHAT, {"type": "file", "file": {"filename": "a.pdf", "file_data": "x"}}, "[document: a.pdf]"),
    (CHAT, {"type": "video_url", "video_url": {"url": "http://127.0.0.1:1"}}, "[video]"),
    (RESPONSES, {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}, "[image]"),
    (RESPONSES, {"type": "input_file", "filename": "a.pdf", "file_data": "x"}, "[document: a.pdf]"),
]


def with_content(path: str, content: dict, place: str) -> dict:
    """Return a body with a content in a message, or in what a tool returns."""
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "#say Hello"}
    parts = [content, text]
    if place == "message":
        given = body(path)
        given["input" if path == RESPONSES else "messages"][0]["content"] = parts
        return given
    if path == RESPONSES:
        made = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": parts}
        return {"model": "m", "input": [{"role": "user", "content": "look"}, made, result]}
    if path == CHAT:
        made = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        result = {"role": "tool", "tool_call_id": "c", "content": parts}
        answer = {"role": "assistant", "content": "", "tool_calls": [made]}
    else:
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": parts}]}
        answer = {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
        }
    given = body(path, "look")
    given["messages"] += [answer, result]
    return given


@pytest.mark.parametrize("place", ["message", "result"])
@pytest.mark.parametrize(("path", "content", "mark"), CONTENTS, ids=lambda v: str(v)[:20])
def test_a_mark_stands_for_what_the_policy_cannot_read(gateway, path, content, mark, place):
    reply = gateway.http.post(path, json=with_content(path, content, place), headers=ANNA)
    assert reply.status_code == 200, reply.text
    assert mark in prompt_of(gateway)


def test_a_conversation_that_began_elsewhere_goes_on_with_marks_for_what_was_said_there(gateway):
    thoughts = [{"type": "redacted_thinking", "data": "xyz"}, {"type": "text", "text": "Yes."}]
    searched = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    ]
    given = body(MESSAGES, "a")
    given["messages"] += [
        {"role": "assistant", "content": thoughts + searched},
        {"role": "user", "content": "#say Hello"},
    ]
    assert gateway.http.post(MESSAGES, json=given, headers=ANNA).status_code == 200
    for mark in ("[redacted thinking]", "[server_tool_use: web_search]", "[web_search_tool_result]"):
        assert mark in prompt_of(gateway)
    given = body(RESPONSES, "a")
    given["input"][1:] = [{"type": "web_search_call", "id": "ws", "status": "completed"}, *given["input"]]
    assert gateway.http.post(RESPONSES, json=given, headers=ANNA).status_code == 200
    assert "[web_search_call]" in prompt_of(gateway)


@pytest.fixture(scope="module")
def strict(chat_model):
    """A gateway that refuses what it could leave out."""
    settings = {"tool_parser": "qwen25", "hosted_tools": "refuse", "contents": "refuse"}
    with GatewayProcess(chat_model, **settings) as process:
        yield process


def test_settings_refuse_all_that_cannot_be_served_at_once(strict):
    tools = [{"type": "web_search"}, {"type": "mcp"}, WEATHER]
    reply = strict.http.post(RESPONSES, json=body(RESPONSES, tools=tools), headers=ANNA)
    assert reply.status_code == 400
    assert "web_search, mcp" in reply.text
    given = with_content(MESSAGES, IMAGE, "result")
    given["messages"][0]["content"] = [IMAGE]
    reply = strict.http.post(MESSAGES, json=given, headers=ANNA)
    assert reply.status_code == 400
    assert "messages.0.content.0: image; messages.2.content.0.content.0: image" in reply.text
    assert (
        strict.http.post(CHAT, json=body(CHAT, f"#say {CALLS}", tools=TOOLS), headers=ANNA).status_code == 200
    )


# ---- helpers


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_an_agents_own_help_is_a_side_turn_unless_the_request_says_otherwise(gateway, path):
    said = "You are a title generator. You output ONLY a thread title. #say Weather"
    for headers, kind in (({}, "side"), ({"x-turn-type": "main"}, "main")):
        reply = gateway.http.post(path, json=body(path, said), headers={**ANNA, **headers})
        assert reply.status_code == 200, reply.text
        [*_, (_, turn)] = gateway.recorded().turns.items()
        assert (turn["type"], turn["reason"]) == (kind, "helper: title" if kind == "side" else "")
