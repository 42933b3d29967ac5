"""Agents with tools that rewrite their histories: what they do to calls, results, reasoning and messages."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from slipstream.rollout.gateway.conversations import User
from slipstream.rollout.gateway.sessions import placing
from slipstream.rollout.tokens.turn_entries import SessionEnd
from tests.unit.rewritings import (
    REMINDER,
    Messages,
    arguments_in_another_order,
    calls_as_texts,
    cut_at,
    date_in_the_system,
    first_question_pinned,
    goal_moves_to_the_end,
    images_replaced,
    merged_users,
    old_answers_cut,
    old_calls_dropped,
    old_results_cleared,
    other_ids,
    other_whitespace,
    reasoning_in_the_text,
    reminder_as_a_message,
    reminder_before_all,
    reminders_between,
    results_in_another_order,
    results_truncated,
    summary_by_the_assistant,
    system,
    text_beside_calls_dropped,
    without_ids,
    without_reasoning,
)
from tests.unit.talking import Gateway, assistant, parsed, tool, user, written_call

NAMINGS: list[dict[str, Any]] = [{}, {"session": "s"}, {"client_session": "c"}]


def summary_by_the_system(history: Messages, step: int) -> Messages:
    start = cut_at(history, 1)
    return [system("be brief"), *([system(f"So far ({step}): much.")] if start else []), *history[start:]]


REWRITINGS: list[Callable[[Messages, int], Messages]] = [
    summary_by_the_assistant,
    results_in_another_order,
    without_reasoning,
    reasoning_in_the_text,
    merged_users,
    other_whitespace,
    date_in_the_system,
    old_results_cleared,
    results_truncated,
    arguments_in_another_order,
    other_ids,
    without_ids,
    images_replaced,
    reminder_as_a_message,
    reminder_before_all,
    reminders_between,
    old_calls_dropped,
    calls_as_texts,
    old_answers_cut,
    text_beside_calls_dropped,
    goal_moves_to_the_end,
    first_question_pinned,
]


NAMED_ONLY = (calls_as_texts, first_question_pinned)
"""They leave nothing that tells whose they are: the session must have a name."""


def hold(gateway, rewrite, naming, *, key="key", turns=6, restarts=False, tag="") -> dict[int, list[Any]]:
    """Hold a conversation with calls, and return the next state that each of its turns must get."""
    history: Messages = []
    expected: dict[int, list[Any]] = {}
    sessions: set[str] = set()
    before = None
    for step in range(turns):
        calls = history[-1].get("tool_calls", ()) if history else ()
        history += [
            {"role": "tool", "content": f"result {tag}{step}.{k} of it", "tool_call_id": call["id"]}
            for k, call in enumerate(calls)
        ] or [user(f"question {tag} number {step}")]
        sent = rewrite(deepcopy(history), step)
        begun = gateway.begin(sent, **naming, user=User(key))
        sessions.add(begun.session)
        if before is not None:
            answers = [place for place, message in enumerate(sent) if message["role"] == "assistant"]
            new = sent[answers[-1] + 1 :] if answers else sent[-1:]
            expected[before] = [message["content"] for message in new]
        called = "".join(
            written_call({"name": "read", "arguments": {"path": f"/{tag}{step}", "line": k}})
            for k in range(2)
        )
        text = f"<think>thought {tag} {step}</think>answer {tag} {step}{called * (step % 2 == 0)}<|end|>"
        message = parsed(text)
        for place, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call_{tag}{step}_{place}"
        before = gateway.end(begun, text, message=message)
        history.append(message)
        if restarts:
            gateway.restart()
    assert len(sessions) == 1, sessions
    return expected


TOLD = [
    pytest.param(rewrite, naming, id=f"{rewrite.__name__}, {', '.join(naming) or 'without a name'}")
    for rewrite in REWRITINGS
    for naming in NAMINGS
    if naming or rewrite not in NAMED_ONLY
]
"""Rewritings with names by which it can be told whose conversation it is."""


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("rewrite", "naming"), TOLD)
def test_each_turn_of_a_rewritten_conversation_gets_its_next_state(rewrite, naming, restarts):
    gateway = Gateway()
    expected = hold(gateway, rewrite, naming, restarts=restarts)
    assert gateway.next_states() == expected
    gateway.append(gateway.sessions.sweep(gateway.now + 1e6))
    [end] = [entry for entry in gateway.journal if isinstance(entry, SessionEnd)]
    assert end.unpaired == (), "the last turn has ended with its conversation"


@pytest.mark.parametrize("naming", NAMINGS)
def test_a_question_behind_a_summary_of_the_systems_may_be_another_agents_and_is_nobodys(naming):
    gateway = Gateway()
    last = 0
    for step in range(4):
        sent = summary_by_the_system([user(f"question {place}") for place in range(step + 1)], step)
        last = gateway.talk(sent, f"answer {step}<|end|>", **naming)
    assert gateway.next_states() == {} and last


@pytest.mark.parametrize(("one", "naming"), TOLD)
def test_users_who_say_the_same_are_never_mixed(one, naming):
    gateway = Gateway()
    expected = {key: hold(gateway, one, naming, key=key) for key in ("anna", "berta")}
    assert gateway.next_states() == expected["anna"] | expected["berta"]
    assert all(gateway.turn(number).key == key for key, turns in expected.items() for number in turns)


def said(number: int) -> Messages:
    return [user(f"question {number}"), assistant(f"answer {number}")]


@pytest.mark.parametrize("naming", NAMINGS)
def test_a_conversation_that_goes_on_with_another_key_belongs_to_that_key_alone(naming):
    """What the first key has said is context to the second, and never its turn."""
    gateway = Gateway()
    first = gateway.talk(said(0)[:1], "answer 0<|end|>", user=User("anna"), **naming)
    second = gateway.talk([*said(0), *said(1)[:1]], "answer 1<|end|>", user=User("berta"), **naming)
    third = gateway.talk([*said(0), *said(1), *said(2)[:1]], "answer 2<|end|>", user=User("anna"), **naming)
    assert gateway.turn(second).parent is None
    assert gateway.next_states().get(second) is None
    assert gateway.next_states().keys() <= {first}, gateway.turn(third)


@pytest.mark.parametrize("naming", NAMINGS)
def test_agents_that_are_forked_from_one_history_each_get_their_own_next_states(naming):
    """Both go on from the same answer, at the same time: the first one is its next state."""
    gateway = Gateway()
    root = gateway.talk(said(0)[:1], "answer 0<|end|>", **naming)
    forks = [[*said(0), user(f"part {name}")] for name in "ab"]
    begun = [gateway.begin(fork, **naming) for fork in forks]
    turns = [gateway.end(each, f"done {name}<|end|>") for each, name in zip(begun, "ab", strict=True)]
    for fork, name in zip(forks[::-1], "ba", strict=True):
        gateway.talk([*fork, assistant(f"done {name}"), user(f"more {name}")], "bye<|end|>", **naming)
    expected = {root: ["part a"], **{turn: [f"more {name}"] for turn, name in zip(turns, "ab", strict=True)}}
    assert gateway.next_states() == expected


def test_answers_that_differ_in_their_reasoning_alone_are_told_apart_where_it_stands_in_the_text():
    gateway = Gateway()
    begun = gateway.begin([user("is 7 prime")], choices=2)
    turns = [
        gateway.end(begun, f"<think>{thought}</think>Yes<|end|>", choice=choice)
        for choice, thought in enumerate(("odd", "a list"))
    ]
    gateway.begin([user("is 7 prime"), assistant("<think>a list</think>Yes"), user("why")])
    assert gateway.next_states() == {turns[1]: ["why"]}


def test_a_reminder_and_left_out_calls_do_not_join_conversations_whose_questions_differ():
    gateway = Gateway()
    call = written_call({"name": "f", "arguments": {}})
    for name in "ab":
        asked, calls = user(f"find {name}"), [{"id": f"c{name}", "function": {"name": "f", "arguments": {}}}]
        called = assistant("", tool_calls=calls)
        gateway.end(gateway.begin([asked]), f"{call}<|end|>", message=called)
        result = {"role": "tool", "content": f"result {name}", "tool_call_id": f"c{name}"}
        gateway.talk([asked, called, result], "Done<|end|>")
    turns = list(gateway.sampled)
    other = gateway.begin([user("find c"), assistant("Done"), user(REMINDER), user("on")])
    begun = gateway.begin([system("s"), user("find b"), assistant("Done"), user(REMINDER), user("on")])
    assert other.session not in {gateway.turn(turn).session for turn in turns}
    assert [states for states in gateway.next_states().values() if "on" in states] == [[REMINDER, "on"]]
    assert begun.session == gateway.turn(turns[-1]).session


def test_of_many_sessions_with_one_answer_that_with_the_same_question_is_found_without_its_calls():
    gateway, many = Gateway(), placing.MOST_COMPARED + 6
    call = written_call({"name": "f", "arguments": {}})
    for n in range(many):
        asked = user(f"find {n}")
        gateway.talk([asked], f"{call}<|end|>", session=f"s{n}")
        called = assistant("", tool_calls=[{"id": "call_0", "function": {"name": "f", "arguments": {}}}])
        history = [asked, called, tool("found"), user(REMINDER)]
        gateway.talk(history, "Done<|end|>", session=f"s{n}")
    begun = gateway.begin([system("s"), user("find 3"), user(REMINDER), assistant("Done"), user("on")])
    assert begun.session == "s3"


FILES = [user("No files are shared."), assistant("Ok.")]
MAP = [user("Here is the repository."), assistant("I won't edit those files.")]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("rewrite", [date_in_the_system, other_ids, without_ids, reminder_before_all])
@pytest.mark.parametrize("own", [FILES, MAP + FILES, MAP + FILES + FILES + MAP])
@pytest.mark.parametrize("place", [-1, -2, -3])
def test_exchanges_of_an_agents_own_do_not_hide_results_that_came_before(
    place, own, rewrite, naming, restarts
):
    """``place``: the exchanges stand before the last so many messages, after the answer with the calls."""
    gateway, history = Gateway(), [user("find it")]
    expected: dict[int, list[str]] = {}
    before = 0
    for step in range(4):
        sent = rewrite([*history[:place], *own, *history[place:]] if step else history, step)
        calls = "".join(written_call({"name": "f", "arguments": {"at": step, "of": n}}) for n in range(2))
        text = f"answer {step}{calls}<|end|>"
        message = parsed(text)
        for n, call in enumerate(message["tool_calls"]):
            call["id"] = f"call_{step}_{n}"
        begun = gateway.begin(sent, **naming)
        turn = gateway.end(begun, text, message=message)
        if before:
            expected[before] = [m["content"] for m in history[-3:]]
        before = turn
        results = [tool(f"result {step}.{n}") | {"tool_call_id": f"call_{step}_{n}"} for n in range(2)]
        history += [message, *results, user(f"question {step}")]
        if restarts:
            gateway.restart()
    assert gateway.next_states() == expected


@pytest.mark.parametrize("naming", NAMINGS)
def test_what_is_said_before_the_beginning_of_an_answer_is_the_next_state(naming):
    gateway, history = Gateway(), [user("question 0")]
    turns = []
    for step in range(3):
        given = [assistant("The ")]
        sent = date_in_the_system([*history, *given], step)
        turns.append(gateway.end(gateway.begin(sent, **naming), f"answer {step}<|end|>"))
        history += [assistant(f"The answer {step}"), user(f"question {step + 1}")]
    assert gateway.next_states() == {turns[0]: ["question 1"], turns[1]: ["question 2"]}


@pytest.mark.parametrize("many", [1, placing.MOST_COMPARED + 6])
@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("left", ["[0.0] ...", "[Old tool result content cleared]"])
def test_results_that_are_cut_once_they_are_answered_hide_no_answer(left, naming, many):
    """Nothing else of the conversation is as it was: the clock in the system's message has gone on."""
    gateway, call = Gateway(), written_call({"name": "f", "arguments": {"of": 1}})
    turns: dict[int, int] = {}
    for n in range(many):
        own = {name: f"{value} {n}" for name, value in naming.items()}
        asked, called = user(f"find number {n}"), parsed(f"{call * 2}<|end|>")
        for place, one in enumerate(called["tool_calls"]):
            one["id"] = f"call_{n}_{place}"
        results = [tool(f"[{n}.{k}] found") | {"tool_call_id": f"call_{n}_{k}"} for k in range(2)]
        gateway.end(gateway.begin([system("at 0"), asked], **own), f"{call * 2}<|end|>", message=called)
        turns[n] = gateway.talk([system("at 1"), asked, called, *results], "Done<|end|>", **own)
    cut = [result | {"content": left} for result in results]
    begun = gateway.begin([system("at 2"), asked, called, *cut, assistant("Done"), user("on")], **own)
    assert begun.session == gateway.turn(turns[many - 1]).session
    assert gateway.next_states()[turns[many - 1]] == ["on"]


def test_of_sessions_with_equal_calls_and_answers_that_with_the_result_is_found():
    """Results are no sign if they are cut, and the best one if they are not."""
    gateway, call = Gateway(), written_call({"name": "f", "arguments": {}})
    turns = []
    for n in range(3):
        called = parsed(f"{call}<|end|>")
        called["tool_calls"][0]["id"] = f"call_{n}"
        asked, result = user(f"find {n}"), tool(f"found {n}") | {"tool_call_id": f"call_{n}"}
        gateway.end(gateway.begin([system("at 0"), asked]), f"{call}<|end|>", message=called)
        turns.append(gateway.talk([system("at 1"), asked, called, result], "<|end|>"))
        if n == 1:
            said = [asked, called, result]
    begun = gateway.begin([system("at 2"), *said, assistant(""), user("on")])
    assert begun.session == gateway.turn(turns[1]).session
    assert gateway.next_states()[turns[1]] == ["on"]
