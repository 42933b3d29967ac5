"""Agents that rewrite their histories: each conversation stays one session, and turns get next states."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.rollout.gateway.conversations import User
from slipstream.rollout.gateway.sessions import placing
from slipstream.rollout.tokens.turn_entries import SessionEnd
from tests.unit.rewritings import (
    REMINDER,
    Messages,
    answered_by_itself,
    changing_system,
    compacted,
    counting,
    moving_reminder,
    parts,
    plain,
    reminded_first,
    sliding,
    system,
    trimmed,
)
from tests.unit.talking import Gateway, assistant, user, written_call


def all_at_once(history: Messages, step: int) -> Messages:
    return [system(f"step {step}"), *moving_reminder(trimmed(history[-3:], step), step)]


REWRITINGS: list[Callable[[Messages, int], Messages]] = [
    plain,
    changing_system,
    sliding,
    compacted,
    reminded_first,
    moving_reminder,
    trimmed,
    parts,
    all_at_once,
    answered_by_itself,
]
NAMINGS: list[dict[str, Any]] = [{}, {"session": "s"}, {"client_session": "c"}]


CHANGED = [*REWRITINGS, counting]


def hold(
    gateway: Gateway, rewrite, naming, *, key="key", turns=5, restarts=False, tag=""
) -> dict[int, list[str]]:
    """Hold a conversation, and return the next state that each of its turns must get."""
    history: Messages = []
    expected: dict[int, list[str]] = {}
    sessions = set()
    before = None
    for step in range(turns):
        question = user(f"question {tag} number {step}")
        history.append(question)
        sent = rewrite(history, step)
        begun = gateway.begin(sent, **naming, user=User(key))
        sessions.add(begun.session)
        if before is not None:
            expected[before] = [sent[-1]["content"]]
        before = gateway.end(begun, f"answer {tag} {step}<|end|>")
        history.append(assistant(f"answer {tag} {step}"))
        if restarts:
            gateway.restart()
    assert len(sessions) == 1
    return expected


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("rewrite", "naming"),
    [
        pytest.param(rewrite, naming, id=f"{rewrite.__name__}, {', '.join(naming) or 'without a name'}")
        for rewrite in CHANGED
        for naming in NAMINGS
        if naming or rewrite is not counting  # else nothing tells whose it is
    ],
)
def test_each_turn_of_a_rewritten_conversation_gets_its_next_state(rewrite, naming, restarts):
    gateway = Gateway()
    expected = hold(gateway, rewrite, naming, restarts=restarts)
    assert gateway.next_states() == expected
    gateway.append(gateway.sessions.sweep(gateway.now + 1e6))
    [end] = [entry for entry in gateway.journal if isinstance(entry, SessionEnd)]
    assert end.unpaired == (), "the last turn has ended with its conversation"


@pytest.mark.parametrize("naming", NAMINGS)
def test_users_who_say_the_same_are_never_mixed(naming):
    for one, two in itertools.product(REWRITINGS, repeat=2):
        gateway = Gateway()
        first = hold(gateway, one, naming, key="anna")
        second = hold(gateway, two, naming, key="berta")
        assert gateway.next_states() == first | second
        owners = (
            {gateway.turn(number).key for number in first},
            {gateway.turn(number).key for number in second},
        )
        assert owners == ({"anna"}, {"berta"})


@pytest.mark.parametrize("other", REWRITINGS)
def test_conversations_of_one_key_that_greet_alike_are_kept_apart_once_they_differ(other):
    gateway = Gateway()
    first = hold(gateway, changing_system, {}, tag="a")
    second = hold(gateway, other, {}, tag="b")
    assert gateway.next_states() == first | second


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("keeps_answer", [True, False])
def test_a_result_that_repeats_the_id_of_a_call_names_its_turn(naming, keeps_answer):
    gateway = Gateway()
    call = {"name": "f", "arguments": {"a": 1}}
    first = gateway.talk([user("find it, please")], f"Well{written_call(call)}<|end|>", **naming)
    calls = [{"id": "call_0", "type": "function", "function": call}]
    rewritten = assistant("(left out)", tool_calls=calls)
    result = {"role": "tool", "content": "found", "tool_call_id": "call_0"}
    history = [user("something else"), *([rewritten] if keeps_answer else []), result]
    begun = gateway.begin(history, **naming)
    assert begun.session == gateway.turn(first).session
    assert gateway.next_states() == {first: ["found"]}


def test_an_id_that_two_conversations_have_made_names_neither():
    gateway = Gateway()
    call = {"name": "f", "arguments": {}}
    turns = [gateway.talk([user(text)], f"{written_call(call)}<|end|>") for text in "ab"]
    result = {"role": "tool", "content": "found", "tool_call_id": "call_0"}
    begun = gateway.begin(
        [user("c"), assistant("x", tool_calls=[{"id": "call_0", "function": call}]), result]
    )
    assert begun.session not in {gateway.turn(turn).session for turn in turns}
    assert gateway.next_states() == {}


def test_the_name_that_a_request_gives_goes_before_ids_and_these_go_before_headers_of_agents():
    gateway = Gateway()
    call = {"name": "f", "arguments": {}}
    first = gateway.talk([user("a")], f"{written_call(call)}<|end|>", client_session="old")
    calls = [{"id": "call_0", "type": "function", "function": call}]
    history = [
        user("b"),
        assistant("", tool_calls=calls),
        {"role": "tool", "content": "r", "tool_call_id": "call_0"},
    ]
    assert gateway.begin(history, session="new").session == "new"
    assert gateway.begin(history, client_session="new").session == gateway.turn(first).session == "old"


def test_of_many_sessions_with_one_answer_few_are_compared_with_a_conversation(monkeypatch):
    """One key may have thousands of them, and the process serves others meanwhile."""
    gateway, many, compared = Gateway(), 10 * placing.MOST_COMPARED, []
    turns = [gateway.talk([system("s"), user(f"is {n} prime")], "Yes<|end|>") for n in range(many)]
    repeats = placing.repeats_at
    monkeypatch.setattr(placing, "repeats_at", lambda *args: compared.append(args) or repeats(*args))
    for n in (3, many - 1):
        asked = user(f"{REMINDER}\n is  {n} prime")
        begun = gateway.begin([system("now"), asked, assistant("Yes"), user(f"why {n}")])
        assert begun.session == gateway.turn(turns[n]).session
    assert len(compared) <= 2 * placing.MOST_COMPARED
    assert gateway.next_states() == {turns[n]: [f"why {n}"] for n in (3, many - 1)}


def test_of_many_sessions_with_one_exchange_none_is_taken_and_none_has_ended():
    gateway, many = Gateway(), placing.MOST_COMPARED + 2
    turns = [gateway.talk([system(f"{n}"), user("is 7 prime")], "Yes<|end|>") for n in range(many)]
    begun = gateway.begin([system("now"), user("is 7 prime"), assistant("Yes"), user("why")])
    assert begun.session not in {gateway.turn(turn).session for turn in turns}
    gateway.append(gateway.sessions.sweep(gateway.now + 1e6))
    lost = {number for entry in gateway.journal if isinstance(entry, SessionEnd) for number in entry.unpaired}
    assert (lost, gateway.next_states()) == (set(turns), {})


def test_an_answer_of_the_clients_own_does_not_hide_that_an_edited_answer_is_nobodys():
    gateway = Gateway()
    hi, hello = user("hi"), assistant("Hello")
    first = gateway.talk([hi], "Hello<|end|>")
    second = gateway.talk([hi, hello, user("go")], "well<|end|>")
    begun = gateway.begin([hi, hello, user("go"), assistant("not well"), user("thanks")])
    assert begun.session == gateway.turn(first).session
    assert gateway.next_states() == {first: ["go"]}
    gateway.end(begun, "bye<|end|>")
    gateway.append(gateway.sessions.sweep(gateway.now + 1e6))
    assert gateway.journal[-1] == SessionEnd(begun.session, "key", (second,))


def test_an_exchange_that_goes_on_already_says_nothing_after_an_answer_of_the_clients_own():
    gateway = Gateway()
    ask, yes = user("is 7 prime"), assistant("Yes")
    first = gateway.talk([system("a"), ask], "Yes<|end|>")
    gateway.talk([system("a"), ask, yes, user("why")], "So<|end|>")
    begun = gateway.begin([system("b"), ask, yes, user("no files"), assistant("Ok."), user("is 8 prime")])
    assert begun.session != gateway.turn(first).session


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_exchange_that_two_sessions_have_names_none_after_an_answer_of_the_clients_own(goes_on):
    gateway = Gateway()
    ask, yes = user("is 7 prime"), assistant("Yes")
    turns = [gateway.talk([system(name), ask], "Yes<|end|>") for name in "ab"]
    if goes_on:
        gateway.talk([system("a"), ask, yes, user("why")], "So<|end|>")
    begun = gateway.begin([system("c"), ask, yes, user("no files"), assistant("Ok."), user("is 8 prime")])
    assert begun.session not in {gateway.turn(turn).session for turn in turns}
    assert gateway.next_states() == ({turns[0]: ["why"]} if goes_on else {})


def test_another_agent_in_the_session_is_nobodys_next_state():
    gateway = Gateway()
    call = {"name": "task", "arguments": {}}
    first = gateway.talk([system("main"), user("go")], f"{written_call(call)}<|end|>", session="s")
    gateway.talk([system("helper"), user("part one"), user("part two")], "done<|end|>", session="s")
    assert gateway.next_states() == {}
    calls = [{"id": "call_0", "type": "function", "function": call}]
    result = {"role": "tool", "content": "done", "tool_call_id": "call_0"}
    gateway.begin([system("main, later"), user("go"), assistant("", tool_calls=calls), result], session="s")
    assert gateway.next_states() == {first: ["done"]}


def test_a_conversation_of_which_a_summary_alone_is_left_goes_on():
    gateway = Gateway()
    first = gateway.talk([system("s"), user("go")], "well<|end|>", session="s")
    gateway.begin([system("s"), user("Summary: they said go."), user("on")], session="s")
    assert gateway.next_states() == {first: ["on"]}


def test_what_claude_code_leaves_of_a_compacted_conversation_goes_on():
    """The summary and the new prompt are parts of one message, and a message of the system follows."""
    gateway = Gateway()
    first = gateway.talk([system("s"), user("go"), system("Monday")], "well<|end|>", session="s")
    summary = "This session is being continued from a previous conversation that ran out of context."
    helper = [system("you search"), user("look it up"), system("Monday")]
    gateway.talk(helper, "found<|end|>", session="other")
    gateway.begin([system("s"), user(f"{REMINDER}\n{summary}\non"), system("tools")], session="s")
    assert gateway.next_states() == {first: [f"{REMINDER}\n{summary}\non"]}
    gateway.begin([system("s"), user(f"{summary}\non")], session="other")
    assert list(gateway.next_states()) == [first], "another system message is another agent"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_turn_that_has_lost_its_next_state_has_not_ended_its_conversation(restarts):
    gateway = Gateway()
    first = gateway.talk([user("hi")], "Hello<|end|>", session="s")
    second = gateway.talk([user("hi"), assistant("Good evening"), user("thanks")], "bye<|end|>", session="s")
    if restarts:
        gateway.restart()
    gateway.append(gateway.sessions.sweep(gateway.now + 1e6))
    assert gateway.next_states() == {}
    assert gateway.journal[-1] == SessionEnd("s", "key", (first,))
    assert gateway.sessions.counters.lost == 1
    assert gateway.turn(second).reason == "history rewritten"
