"""Agents that rewrite their histories in several ways at once, and what single compositions have taught."""

from typing import Any

import pytest

from slipstream.rollout.tokens.turn_entries import SessionEnd
from tests.unit.rewriting_agents import World
from tests.unit.rewritten_histories import CONTINUED, REMINDER, system
from tests.unit.talking import Gateway, assistant, parsed, tool, user, written_call

READ = {"name": "read", "arguments": {"path": "/a"}}


def called(gateway: Gateway, messages: list[dict[str, Any]], text: str, id_: str = "", **naming: Any) -> int:
    """Answer with a tool call that has an id, or none; return the number of the turn."""
    sampled = f"{text}{written_call(READ)}<|end|>"
    message = parsed(sampled)
    message["tool_calls"][0]["id"] = id_
    return gateway.end(gateway.begin(messages, **naming), sampled, message=message)


def calls(text: str, id_: str = "") -> dict[str, Any]:
    return assistant(text, tool_calls=[{"id": id_, "type": "function", "function": READ}])


def unpaired(gateway: Gateway) -> set[int]:
    gateway.append(gateway.sessions.sweep(gateway.now + 1e6))
    return {number for entry in gateway.journal if isinstance(entry, SessionEnd) for number in entry.unpaired}


@pytest.mark.parametrize("seeds", [range(place, place + 75) for place in range(0, 300, 75)])
def test_a_next_state_is_what_was_said_after_that_answer_however_agents_rewrite_it(seeds):
    problems = [problem for seed in seeds for problem in World(seed, restarts=seed % 2 == 1).run().problems]
    assert not problems, problems[0]


def test_calls_and_answers_to_questions_of_the_policys_are_no_exchanges_of_the_clients_own():
    """The turns between are in another session: there the client had put a summary before them."""
    gateway, hi, hello = Gateway(), user("hi"), assistant("Hello")
    first = gateway.talk([hi], "Hello<|end|>")
    rest = [user("find it"), calls("", "c1"), tool("found")]
    second = called(gateway, [user("Summary: they greet."), rest[0]], "")
    third = gateway.talk([user("Summary: they look."), *rest], "Done<|end|>")
    gateway.begin([hi, hello, *rest, assistant("Done"), user("thanks")])
    assert gateway.next_states() == {second: ["found"], third: ["thanks"]} and first == 1


def test_of_two_sessions_that_with_the_last_answer_goes_before_that_with_the_beginning():
    gateway, hi, hello = Gateway(), user("hi"), assistant("Hello")
    first = gateway.talk([hi], "Hello<|end|>")
    second = gateway.talk([user("Summary: they greet."), user("is 7 prime")], "Yes<|end|>")
    gateway.begin([hi, hello, user("is 7 prime"), assistant("Yes"), user("why")])
    assert gateway.next_states() == {second: ["why"]} and first != second


def test_a_turn_whose_conversation_has_gone_on_in_another_session_has_not_ended_it():
    gateway, ask, yes = Gateway(), user("is 7 prime"), assistant("Yes")
    first = gateway.talk([ask], "Yes<|end|>")
    second = gateway.talk([user("Summary: 7 is prime."), user("is 8 prime")], "No<|end|>")
    gateway.talk([ask, yes, user("is 8 prime"), assistant("No"), user("why")], "2 divides 8.<|end|>")
    assert gateway.next_states() == {second: ["why"]}
    assert unpaired(gateway) == {first}


def test_what_is_said_to_calls_that_are_left_out_goes_to_their_turn():
    gateway, ask = Gateway(), [user("hi"), assistant("Hello"), user("find it")]
    first = gateway.talk(ask[:1], "Hello<|end|>", session="s")
    second = called(gateway, ask, "", "call_7", session="s")
    result = tool("found") | {"tool_call_id": "call_7"}
    gateway.begin([*ask, result, user("go on")], session="s")
    assert gateway.next_states() == {first: ["find it"], second: ["found", "go on"]}


def test_an_id_that_other_calls_have_does_not_name_a_turn():
    gateway = Gateway()
    first = called(gateway, [user("find it")], "", "call_0", session="s")
    other = assistant("", tool_calls=[{"id": "call_0", "function": {"name": "write", "arguments": {}}}])
    gateway.talk([user("write it"), other, tool("written")], "Done<|end|>", session="s")
    assert gateway.next_states() == {} and unpaired(gateway) == {first}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_prefilled_answer_hides_neither_what_was_said_before_it_nor_that_it_is_nobodys(restarts):
    gateway, given = Gateway(), assistant("The ")
    first = gateway.talk([user("hi")], "Hello<|end|>", session="s")
    edited = [user("hi"), assistant("Good evening"), user("what is it"), given]
    second = gateway.talk(edited, "cat<|end|>", session="s")
    if restarts:
        gateway.restart()
    history = [system("now"), user("what is it"), assistant("The cat"), user("why"), given]
    gateway.talk(history, "answer is<|end|>", session="s")
    assert gateway.next_states() == {second: ["why"]}
    assert unpaired(gateway) == {first}


def test_a_question_that_is_asked_again_is_no_reaction_to_its_answer():
    gateway, ask = Gateway(), [system("s"), user("go"), user("is 7 prime")]
    gateway.talk(ask, "Yes<|end|>", session="s")
    gateway.begin([ask[0], user(f"{REMINDER}go"), ask[2], user(REMINDER)], session="s")
    assert gateway.next_states() == {}


def test_a_summary_alone_does_not_say_which_of_several_answers_is_meant():
    gateway = Gateway()
    begun = gateway.begin([system("s"), user("go")], session="s", choices=2)
    turns = {gateway.end(begun, f"answer {choice}<|end|>", choice=choice) for choice in range(2)}
    gateway.begin([system("s"), user(f"{CONTINUED}\non")], session="s")
    assert gateway.next_states() == {} and len(turns) == 2


def test_an_agent_that_begins_as_one_before_it_is_nobodys_next_state():
    gateway, parts = Gateway(), ["files: none", "look for a", "look for b"]
    gateway.talk([system("main"), user("go")], "well<|end|>", session="s")
    gateway.talk([system("you search"), user(parts[0]), user(parts[1])], "found<|end|>", session="s")
    gateway.begin([system("you search"), user(parts[0]), user(parts[2])], session="s")
    assert gateway.next_states() == {}


def test_a_turn_with_the_same_answer_as_one_that_goes_on_already_may_have_lost_its_next_state():
    gateway, go, okay = Gateway(), user("continue"), assistant("OK")
    first = gateway.talk([go], "OK<|end|>", session="s")
    second = gateway.talk([go, okay, go], "OK<|end|>", session="s")
    gateway.talk([go, okay, user("now stop")], "Stopped.<|end|>", session="s")  # a window, or another try
    assert gateway.next_states() == {first: ["continue"]}
    assert unpaired(gateway) == {second}


def test_an_answer_as_it_is_goes_before_one_with_the_same_calls_and_other_text():
    gateway, ask = Gateway(), [user("find it")]
    first = called(gateway, ask, "", session="s")
    second = called(gateway, ask, "I look there first", session="s")
    for text, said in (("", "done"), ("I look there first", "found")):
        gateway.talk([system("now"), *ask, calls(text), tool(said)], f"{said}<|end|>", session="s")
    assert gateway.next_states() == {first: ["done"], second: ["found"]}


def test_a_call_that_is_made_again_is_another_turn_than_the_one_before_it():
    gateway, ask = Gateway(), [user("find it")]
    first = called(gateway, ask, "", session="s")
    called(gateway, [*ask, calls(""), tool("nothing")], "", session="s")  # the answer is thrown away
    gateway.talk([system("now"), *ask, calls(""), tool("nothing")], "Done<|end|>", session="s")
    assert gateway.next_states() == {first: ["nothing"]}


def test_a_question_that_is_asked_again_after_an_equal_answer_is_no_reaction_to_its_own():
    gateway, ask, okay, more = Gateway(), user("begin"), assistant("OK"), user("and now")
    first = gateway.talk([ask], "OK<|end|>", session="s")
    gateway.talk([ask, okay, more], "OK<|end|>", session="s")  # the answer is thrown away
    gateway.talk([okay, more], "So<|end|>", session="s")
    assert gateway.next_states() == {first: ["and now"]}


def test_an_exchange_of_the_clients_own_does_not_hide_the_session_with_the_last_answer():
    gateway, hi, hello = Gateway(), user("hi"), assistant("Hello")
    first = gateway.talk([hi], "Hello<|end|>")
    second = gateway.talk([user("Summary: they greet."), user("is 7 prime")], "Yes<|end|>")
    aider = [user("no files"), assistant("Ok."), user("why")]
    gateway.begin([hi, hello, user("is 7 prime"), assistant("Yes"), *aider])
    assert gateway.next_states() == {second: ["why"]} and first != second


@pytest.mark.parametrize("restarts", [False, True])
def test_a_turn_whose_answer_nobody_can_recognise_has_not_ended_its_conversation(restarts):
    """Also where nothing else of the conversation is known, so that it counts as a new one."""
    gateway = Gateway()
    first = gateway.talk([user("hi")], "Hello<|end|>", session="s")
    second = gateway.talk([user("1: hi"), assistant("2: Hel..."), user("1: on")], "bye<|end|>", session="s")
    assert gateway.turn(second).reason == "new conversation"
    if restarts:
        gateway.restart()
    assert gateway.next_states() == {} and unpaired(gateway) == {first}
