"""The ordinary calls of OpenAI's official client."""

import json

import openai
import pytest

from tests.clients.test_errors import user
from tests.clients.tools import CALLS, TOOLS, WEATHER
from tests.scripted_source import logprob


@pytest.fixture
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="key-anna", max_retries=0) as client:
        yield client


def test_a_completion_has_text_usage_and_session(client):
    raw = client.chat.completions.with_raw_response.create(model="m", messages=user("#say Hällo 😀"))
    answer = raw.parse()
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Hällo 😀", "stop")
    assert answer.usage.completion_tokens == len("Hällo 😀".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.session_id == raw.headers["x-session-id"]
    assert answer.model == "m"


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_stream_gives_the_same_text_wherever_characters_are_cut(client, chunk):
    text = "Grüße, 世界! 😀\n"
    stream = client.chat.completions.create(
        model="m",
        messages=user(f"#chunk={chunk} #say {text}"),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == len(text.encode()) + 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert len({c.session_id for c in chunks}) == 1


@pytest.mark.parametrize("chunk", [1, 5, 500])
@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls(client, stream, chunk):
    messages = user(f"#chunk={chunk} #say {CALLS}")
    if stream:
        with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as events:
            completion = events.get_final_completion()
    else:
        completion = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("weather", {"city": "Köln"}), ("weather", {"city": "Rom"})]
    assert len({call.id for call in choice.message.tool_calls}) == 2


@pytest.mark.parametrize("chunk", [1, 50])
@pytest.mark.parametrize(
    ("written", "city"),
    [("\\ud83d\\ude00", "😀"), ("\\ud83d-\\ude00", "\ufffd-\ufffd"), ("\\\\ud83d", "\\ud83d")],
)
def test_escaped_surrogates_in_streamed_calls(client, chunk, written, city):
    """Half a character would end the stream with an error: JSON cannot carry it."""
    call = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{written}"}}}}\n</tool_call>'
    messages = user(f"#chunk={chunk} #say {call}")
    with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as events:
        [choice] = events.get_final_completion().choices
    [called] = choice.message.tool_calls
    assert json.loads(called.function.arguments) == {"city": city}


@pytest.mark.parametrize("stream", [False, True])
def test_the_message_that_is_recorded_is_the_one_that_the_client_repeats(client, gateway, stream):
    messages = user(f"#say I look.\n{CALLS}")
    if stream:
        with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as events:
            answer = events.get_final_completion().choices[0].message
    else:
        answer = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message
    recorded = gateway.control()["answers"][-1]["message"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "dry"} for call in answer.tool_calls]
    client.chat.completions.create(
        model="m", messages=[*messages, answer.model_dump(exclude_none=True), *results], tools=TOOLS
    )
    repeated = gateway.control()["arrivals"][-1]["messages"][1]
    assert repeated["content"] == recorded["content"]
    assert [call["function"]["arguments"] for call in repeated["tool_calls"]] == [
        call["function"]["arguments"] for call in recorded["tool_calls"]
    ]


def test_a_call_that_was_cut_off_behind_its_name_can_be_repeated(client, gateway):
    """Clients send it again as they have got it: without arguments."""
    messages = user(f"#say I look.\n{CALLS}")
    settings = {"model": "m", "tools": TOOLS}
    with (
        client.chat.completions.stream(messages=messages, max_tokens=35, **settings) as events,
        pytest.raises(openai.LengthFinishReasonError) as ended,
    ):
        events.get_final_completion()
    repeated = ended.value.completion.choices[0].message.model_dump(exclude_none=True)
    [call] = repeated["tool_calls"]
    assert call["function"]["arguments"] == ""
    result = {"role": "tool", "tool_call_id": call["id"], "content": "it was cut off"}
    client.chat.completions.create(messages=[*messages, repeated, result], **settings)
    known = gateway.control()["arrivals"][-1]["messages"][1]
    assert known["tool_calls"][0]["function"] == {"name": "weather", "arguments": {}}


@pytest.mark.parametrize("arguments", ['{"city": "K', "[1]", "Köln"])
def test_arguments_that_are_no_object_stay_what_they_are(client, gateway, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        *user("a"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "these are no arguments"},
    ]
    assert client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices
    known = gateway.control()["arrivals"][-1]["messages"][1]
    assert known["tool_calls"][0]["function"]["arguments"] == arguments


def test_several_answers_have_different_seeds(client, gateway):
    before = len(gateway.control()["requests"])
    answer = client.chat.completions.create(model="m", messages=user("#say a"), n=3, seed=5)
    assert [choice.message.content for choice in answer.choices] == ["a"] * 3
    assert [r["sampling_seed"] for r in gateway.control()["requests"][before:]] == [5, 6, 7]
    stream = client.chat.completions.create(model="m", messages=user("#say abc"), n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "abc", 1: "abc"}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_the_engines_own(client, stream):
    settings = {"model": "m", "messages": user("#say abcd"), "logprobs": True, "top_logprobs": 2}
    if stream:
        content = [
            token
            for chunk in client.chat.completions.create(**settings, stream=True)
            for choice in chunk.choices
            for token in (choice.logprobs.content if choice.logprobs else None) or []
        ]
    else:
        content = client.chat.completions.create(**settings).choices[0].logprobs.content
    assert [token.token for token in content[:4]] == list("abcd")
    assert [token.logprob for token in content] == pytest.approx([logprob(i) for i in range(5)])
    assert [len(token.top_logprobs) for token in content] == [2] * 5


@pytest.mark.parametrize("chunk", [1, 2, 64])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_wherever_it_is_cut(client, gateway, chunk, stream):
    settings = {"model": "m", "messages": user(f"#chunk={chunk} #say one ENDtwo"), "stop": ["END"]}
    if stream:
        chunks = list(client.chat.completions.create(**settings, stream=True))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        reason = chunks[-1].choices[0].finish_reason
    else:
        [choice] = client.chat.completions.create(**settings).choices
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == ("one ", "stop")
    assert len(gateway.control()["answers"][-1]["tokens"]) == len("one END")


def test_what_a_request_does_not_say_is_the_recipes(client, gateway):
    client.chat.completions.create(model="m", messages=user("#say a"))
    said = gateway.control()["requests"][-1]
    assert (said["temperature"], said["top_p"], said["top_k"]) == (0.9, 1.0, -1)
    assert said["prompt"] + said["max_new_tokens"] == 2048
    answer = client.chat.completions.create(model="m", messages=user("#say abcdef"), max_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "length")
    client.chat.completions.create(model="m", messages=user("#say a"), max_tokens=100_000)


def test_roles_and_parts_of_other_clients(client, gateway):
    client.chat.completions.create(
        model="m",
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "user", "content": [{"type": "text", "text": "#say a"}]},
        ],
    )
    messages = gateway.control()["arrivals"][-1]["messages"]
    assert [(m["role"], m["content"]) for m in messages] == [("system", "be brief"), ("user", "#say a")]


def test_the_text_of_a_completion_and_its_echo(client):
    answer = client.completions.create(model="m", prompt="#say abc", max_tokens=9, echo=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("#say abcabc", "stop")
    parts = client.completions.create(model="m", prompt=["#say a", "#say b"], max_tokens=9, stream=True)
    texts = {0: "", 1: ""}
    for part in parts:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "a", 1: "b"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_log_probs_of_an_echo(client, stream, max_tokens):
    """As programs ask that score given answers."""
    prompt = "#chunk=1 #say abc"
    settings = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    if stream:
        choices = [part.choices[0] for part in client.completions.create(**settings, stream=True)]
    else:
        choices = client.completions.create(**settings).choices
    assert "".join(choice.text for choice in choices) == prompt + "abc"[:max_tokens]
    tokens, logprobs, tops = (
        [value for choice in choices if choice.logprobs for value in getattr(choice.logprobs, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs")
    )
    assert "".join(tokens) == prompt + "abc"[:max_tokens]
    assert logprobs[0] is None
    given, sampled = range(1, len(prompt)), range(max_tokens)
    assert logprobs[1:] == pytest.approx([logprob(place) for part in (given, sampled) for place in part])
    assert [top is None for top in tops] == [True] + [False] * (len(tops) - 1)
    assert len(tops) == len(logprobs)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors_are_the_clients_own_classes(client, gateway):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as caught:
        client.chat.completions.create(model="m", messages=user("x" * 3000))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(model="m", messages=user("a"))
    with pytest.raises(openai.BadRequestError, match="the script rejects it"):
        client.chat.completions.create(model="m", messages=user("#reject"), stream=True)
    with pytest.raises(openai.BadRequestError, match="lora_path"):
        client.chat.completions.create(model="m", messages=user("a"), extra_body={"lora_path": "x"})
    gateway.control(full_for_s=3)
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="m", messages=user("a"), stream=True)
        assert caught.value.response.headers["retry-after"] == "3"
    finally:
        gateway.control(full_for_s=None)


class TestResponses:
    def test_text(self, client):
        answer = client.responses.create(model="m", input="#say Hello", instructions="be brief")
        assert (answer.output_text, answer.status) == ("Hello", "completed")
        assert answer.usage.output_tokens == len("Hello") + 1
        short = client.responses.create(model="m", input="#say Hello", max_output_tokens=2)
        assert (short.output_text, short.status) == ("He", "incomplete")

    def test_a_stream(self, client, gateway):
        with client.responses.stream(model="m", input="#chunk=2 #say Hello") as events:
            text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            assert events.get_final_response().output_text == text == "Hello"
        assert gateway.control()["answers"][-1]["message"] == {"role": "assistant", "content": "Hello"}

    @pytest.mark.parametrize("stream", [False, True])
    def test_tools(self, client, gateway, stream):
        settings = {"model": "m", "input": f"#say {CALLS}", "tools": [WEATHER]}
        if stream:
            with client.responses.stream(**settings) as events:
                answer = events.until_done().get_final_response()
        else:
            answer = client.responses.create(**settings)
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Köln"}, {"city": "Rom"}]
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "dry"} for call in calls
        ]
        again = client.responses.create(
            model="m", input=outputs, previous_response_id=answer.id, tools=[WEATHER]
        )
        assert again.output_text == "ok"
        seen = gateway.control()["arrivals"][-1]
        assert seen["session"] == answer.session_id == again.session_id
        assert [m["role"] for m in seen["messages"]] == ["user", "assistant", "tool", "tool"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_response_can_be_retrieved_as_it_was(self, client, stream):
        settings = {
            "model": "m",
            "input": f"#say I look.\n{CALLS}",
            "tools": [WEATHER],
            "metadata": {"a": "b"},
        }
        if stream:
            [*_, end] = client.responses.create(**settings, stream=True)
            answer = end.response
        else:
            answer = client.responses.create(**settings)
        retrieved = client.responses.retrieve(answer.id)
        assert retrieved.to_dict() == answer.to_dict()
        assert [item.type for item in retrieved.output] == ["message", "function_call", "function_call"]
        assert (retrieved.metadata, retrieved.session_id) == ({"a": "b"}, answer.session_id)

    def test_a_conversation_goes_on_by_names_and_may_branch(self, client, gateway):
        first = client.responses.create(model="m", input="#say one", instructions="be brief")
        second = client.responses.create(model="m", input="#say two", previous_response_id=first.id)
        third = client.responses.create(
            model="m", input=[{"role": "user", "content": "#say three"}], previous_response_id=second.id
        )
        other = client.responses.create(model="m", input="#say other", previous_response_id=first.id)
        assert (third.output_text, other.output_text) == ("three", "other")
        assert third.previous_response_id == second.id
        assert {answer.session_id for answer in (first, second, third, other)} == {first.session_id}
        third_messages, other_messages = (
            [(message["role"], message["content"]) for message in arrival["messages"]]
            for arrival in gateway.control()["arrivals"][-2:]
        )
        one = [("user", "#say one"), ("assistant", "one")]  # instructions are those of one request
        assert third_messages == [*one, ("user", "#say two"), ("assistant", "two"), ("user", "#say three")]
        assert other_messages == [*one, ("user", "#say other")]

    def test_nobody_sees_or_continues_the_response_of_another_key(self, client):
        answer = client.responses.create(model="m", input="#say secret")
        other = client.with_options(api_key="key-berta")
        with pytest.raises(openai.BadRequestError):
            other.responses.create(model="m", input="#say a", previous_response_id=answer.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(answer.id)
        for name in (answer.id.removeprefix("resp_"), "resp_", "resp_1", answer.id + "0"):
            with pytest.raises(openai.BadRequestError):
                client.responses.create(model="m", input="#say a", previous_response_id=name)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(name)

    def test_a_response_that_is_not_to_be_stored_has_no_name(self, client):
        answer = client.responses.create(model="m", input="#say a", store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="m", input="#say a", previous_response_id=answer.id)


async def _read(client, text: str) -> str:
    stream = await client.chat.completions.create(model="m", messages=user(f"#say {text}"), stream=True)
    return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])


def test_many_streams_at_once(gateway):
    import asyncio

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="key-anna") as client:
            texts = [f"number {i}" for i in range(24)]
            assert await asyncio.gather(*(_read(client, text) for text in texts)) == texts

    asyncio.run(main())
