"""Sameness of messages, and sampling that cannot be reproduced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.gateway.sessions.sampling import judge_sampling
from slipstream.rollout.tokens.conversation.sameness import (
    digest_alone,
    is_answer,
    is_rewritten,
    marks_of,
)
from tests.unit.talking import assistant, user


def call(arguments, **more):
    return assistant(None, tool_calls=[{"function": {"name": "f", "arguments": arguments}, **more}])


SAME = [
    (user("hi"), user([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}])),
    (user("hi"), user([{"type": "input_text", "text": "hi"}])),
    (assistant("hi", id="1"), assistant("hi", name="bot", refusal=None, tool_calls=[])),
    (assistant("hi", reasoning_content="so"), assistant("hi")),
    (assistant([{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "hi"}]), assistant("hi")),
    (assistant("\n\nhi \n"), assistant("hi")),
    (assistant("a  \n\n\nb"), assistant("a\r\n\r\nb")),
    (assistant("a\n```py\nb\n```"), assistant("a\nb")),
    (assistant("cafe\u0301"), assistant("caf\u00e9")),
    (assistant("a\nb"), assistant([{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}])),
    (assistant("\n\n"), assistant(None)),
    (assistant(None), assistant("")),
    (assistant(None), {"role": "assistant"}),
    ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
    ({"role": "function", "content": "x"}, {"role": "tool", "content": "x", "tool_call_id": "3"}),
    (call('{"a": 1, "b": [2.0]}', id="1"), call({"b": [2], "a": 1}, id="2", type="function")),
    (call(""), call("{}")),
    (call('{"a": 1}'), assistant("", function_call={"name": "f", "arguments": '{"a":1}'})),
]
DIFFERENT = [
    (user("hi"), user("hi ")),
    (user("hi"), assistant("hi")),
    (user("hi"), {"role": "system", "content": "hi"}),
    (user("ab"), user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
    (call({"a": 1}), call({"a": True})),
    (call({"a": 1}), call({"a": "1"})),
    (call("{"), call('"{"')),
    (call({}), assistant("")),
    (user('["a", []]'), user(["a", []])),
    (
        user([{"type": "image_url", "image_url": {"url": "x"}}]),
        user([{"type": "image_url", "image_url": {"url": "y"}}]),
    ),
]


@pytest.mark.parametrize(("one", "two"), SAME)
def test_messages_are_the_same_by_role_text_and_calls(one, two):
    assert digest_alone(one) == digest_alone(two)


@pytest.mark.parametrize(("one", "two"), DIFFERENT)
def test_messages_differ_by_role_text_and_calls(one, two):
    assert digest_alone(one) != digest_alone(two)


LONG = "the file is empty, so I write it"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (assistant(f"coder: {LONG}"), True),
        (assistant(f"{LONG}\n[interrupted]"), True),
        (assistant(f"not {LONG[:9]}"), False),
        (call({}, id="1") | {"content": LONG}, False),
    ],
)
def test_a_long_answer_is_known_in_what_is_written_around_it(other, expected):
    assert is_answer(assistant(LONG), other) is expected


def test_pictures_and_notes_in_their_places_do_not_say_what_a_message_is():
    def shown(text, picture):
        return user([{"type": "text", "text": part} for part in (text, picture)])

    assert is_rewritten(shown("what is it", "[image]"), shown("what is it", "[image omitted]"))
    assert not is_rewritten(shown("what is it", "[image]"), shown("who is it", "[image]"))


def test_messages_of_blanks_are_known_and_pictures_are_not_blanks():
    picture = user([{"type": "image_url", "image_url": {"url": "x"}}])
    assert is_rewritten(user(""), user("  \n"))
    assert not is_rewritten(user(""), picture)


def test_a_message_of_blocks_in_tags_alone_is_known_with_a_reminder_after_it():
    one, other = user("<file>a</file>"), user("<file>b</file>")
    assert is_rewritten(one, user(f"{one['content']}\n<system-reminder>x</system-reminder>"))
    assert not is_rewritten(one, other)


def test_an_answer_with_calls_is_known_without_the_text_beside_them():
    assert is_answer(call({"a": 1}) | {"content": "Well"}, call('{"a": 1}'))
    assert not is_answer(call({"a": 1}), call({"a": 1}) | {"content": "Well"}), "agents add no text"
    assert not is_answer(call({"a": 1}) | {"content": "Well"}, call('{"a": 2}'))
    assert not is_answer(assistant("well"), assistant("not well"))


def test_messages_that_are_nested_too_deeply_are_refused_and_never_crash():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        digest_alone({"role": "user", "content": [{"type": "x", "x": deep}]})
    assert digest_alone(call("[" * 100_000)) != digest_alone(call("[" * 99_999))


def test_half_a_surrogate_pair_has_a_digest():
    assert digest_alone(user("\ud800")) == digest_alone(user("?"))


@given(st.lists(st.sampled_from([m for pair in (*SAME, *DIFFERENT) for m in pair]), max_size=5), st.data())
def test_histories_are_equal_exactly_as_far_as_their_messages_are(messages, data):
    other = data.draw(st.lists(st.sampled_from([*messages, user("x")]), max_size=5))
    equal = 0
    for one, two in zip(messages, other, strict=False):
        if digest_alone(one) != digest_alone(two):
            break
        equal += 1
    marks, others = marks_of(messages), marks_of(other)
    shared = [a.history == b.history for a, b in zip(marks, others, strict=False)]
    assert shared == [True] * equal + [False] * (len(shared) - equal)


REPRODUCIBLE = [
    {},
    {"temperature": 0.7},
    {"temperature": None, "top_p": None, "stop": ["x"], "max_new_tokens": 5, "sampling_seed": 3},
    {"top_p": 1, "top_k": -1, "min_p": 0.0, "logit_bias": {}, "repetition_penalty": 1.0},
    {"top_k": 1 << 30, "frequency_penalty": 0, "presence_penalty": 0, "min_new_tokens": 0, "regex": None},
]
CHANGED = {
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "frequency_penalty": 0.1,
    "presence_penalty": -0.1,
    "repetition_penalty": 1.1,
    "min_new_tokens": 1,
    "logit_bias": {"5": 1.0},
    "json_schema": "{}",
    "regex": "a",
    "ebnf": "root ::= 'a'",
    "structural_tag": "{}",
}


@pytest.mark.parametrize("sampling", REPRODUCIBLE)
def test_sampling_from_the_softmax_at_the_recipes_temperature_is_reproducible(sampling):
    verdict = judge_sampling(sampling, 0.7, override=False)
    assert not verdict.reasons and verdict.sampling["temperature"] == 0.7
    assert judge_sampling(sampling, 0.7, override=True).overridden is False


@pytest.mark.parametrize("changed", sorted(CHANGED))
def test_each_parameter_that_changes_the_distribution_is_named_or_overridden(changed):
    sampling = {changed: CHANGED[changed], "stop": ["x"]}
    verdict = judge_sampling(sampling, 0.7, override=False)
    assert verdict.reasons == (changed,) and verdict.sampling[changed] == CHANGED[changed]
    verdict = judge_sampling(sampling, 0.7, override=True)
    assert verdict.overridden and not verdict.reasons
    assert verdict.sampling == {"temperature": 0.7, "stop": ["x"]}
