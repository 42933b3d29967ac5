"""Sessions: naming by history, prompts that continue, branches, next states, retries, ends and limits."""

import json
import time

import numpy as np
import pytest

from slipstream.rollout.gateway.conversations import (
    ClientReward,
    NamedAnswer,
    PromptTooLong,
    TooManySessions,
    UnknownTurn,
    User,
)
from slipstream.rollout.gateway.sessions.placing import SessionLimits
from slipstream.rollout.gateway.source import Finished
from slipstream.rollout.system.steady_clock import steady_s
from slipstream.rollout.tokens.record import decode_chunks
from slipstream.rollout.tokens.trajectory import Finish
from slipstream.rollout.tokens.turn_entries import Forgotten, SessionEnd, Turn, TurnType, UserReward
from tests.unit.branches import RecordedTurn, branches_of, messages_of_turn, rebuild
from tests.unit.talking import END, ChatTemplate, Gateway, assistant, decode, encode, tool, user, written_call

ODD = [*b"Hello", END]
"""An answer that ``encode`` would cut otherwise: "he" and "ll" are pairs."""


@pytest.fixture
def gateway():
    return Gateway()


def test_the_next_prompt_is_the_sampled_ids_and_then_what_is_new(gateway):
    first = gateway.talk([user("hi")], ODD)
    assert encode("Hello") != ODD[:-1]
    begun = gateway.begin([user("hi"), assistant("Hello"), user("more")])
    prompt, sampled = gateway.sampled[first]
    assert begun.input_ids == prompt + sampled + encode("<|user|>more<|end|><|assistant|>")
    second = gateway.end(begun, "bye<|end|>")
    turn = gateway.turn(second)
    assert (turn.parent, turn.shared, turn.kept, turn.reason) == (first, len(prompt + sampled), 2, "")
    assert json.loads(bytes(turn.messages)) == [user("more")]
    assert turn.session == gateway.turn(first).session
    assert gateway.sessions.counters.branches == {}


def test_ids_key_order_and_reasoning_that_clients_change_make_no_branch(gateway):
    function = {"name": "f", "arguments": {"a": 1, "b": [True, None]}}
    first = gateway.talk([user("hi")], f"<think>so</think>Well{written_call(function)}<|end|>")
    assert "<think>" in decode(gateway.sampled[first][1])
    sent = {"name": "f", "arguments": {"b": [True, None], "a": 1.0}}
    repeated = assistant("Well", tool_calls=[{"function": sent, "id": "other", "type": "function"}])
    second = gateway.talk([user("hi"), repeated, tool("1"), tool("2")], "ok<|end|>")
    assert gateway.turn(second).shared == sum(map(len, gateway.sampled[first]))
    assert gateway.turn(second).reason == ""
    assert gateway.next_states() == {first: ["1", "2"]}, "parallel tool results are one next state"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param([*b"Obs: "], "Ob", id="stop string within a word"),
        pytest.param([*b"Obs:", *b" x"], "Ob", id="text behind the stop string"),
    ],
)
def test_a_stop_string_stays_in_the_ids_and_makes_no_branch(gateway, answer, message):
    begun = gateway.begin([user("hi")])
    finish = Finished(Finish.STOP, "s:")
    first = gateway.end(begun, answer, finish=finish, message=assistant(message))
    second = gateway.begin([user("hi"), assistant(message), user("x")])
    repeated = [*gateway.sampled[first][0], *answer]
    assert second.input_ids == repeated + encode("<|end|><|user|>x<|end|><|assistant|>")
    gateway.restart()
    again = gateway.begin([user("hi"), assistant(message), user("x")], session=begun.session)
    assert again.input_ids == second.input_ids


def test_an_answer_cut_off_within_a_character_makes_no_branch(gateway):
    begun = gateway.begin([user("hi")])
    first = gateway.end(begun, [*"é".encode(), 0xE2, 0x82], message=assistant("é"))
    second = gateway.begin([user("hi"), assistant("é"), user("x")])
    assert second.input_ids[: gateway.turn(first).shared + len(begun.input_ids) + 4] == [
        *begun.input_ids,
        *"é".encode(),
        0xE2,
        0x82,
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param("<think>so", assistant("", reasoning_content="so"), id="within the reasoning"),
        pytest.param(
            '<call>{"name":"f","arguments":',
            assistant("", tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
            id="within a call",
        ),
    ],
)
def test_an_answer_that_ends_where_the_template_goes_on_begins_a_branch(gateway, answer, message):
    """The token that ends it would else stand in the middle of what the template writes."""
    begun = gateway.begin([user("hi")])
    first = gateway.end(begun, f"{answer}<|end|>", message=message)
    history = [user("hi"), message, user("x")]
    second = gateway.talk(history, "y<|end|>")
    assert decode(gateway.sampled[second][0]) == ChatTemplate().render(history, answer=True)
    assert gateway.turn(second).parent == first
    assert gateway.turn(second).shared == len(begun.input_ids) + len(encode(answer))


def test_an_end_token_that_the_template_does_not_write_makes_no_branch(gateway):
    other = 258  # a mark as well
    begun = gateway.begin([user("hi")])
    first = gateway.end(
        begun, [*encode("yes"), other], finish=Finished(Finish.STOP, other), message=assistant("yes")
    )
    second = gateway.begin([user("hi"), assistant("yes"), user("x")])
    assert second.input_ids == [
        *begun.input_ids,
        *gateway.sampled[first][1],
        *encode("<|end|><|user|>x<|end|><|assistant|>"),
    ]


@pytest.mark.parametrize("sends_reasoning", [True, False])
@pytest.mark.parametrize("continued", [0, 1])
def test_of_answers_that_differ_in_their_reasoning_the_one_that_is_meant_is_repeated(
    gateway, sends_reasoning, continued
):
    """Two answers to one question say the same; a client that leaves out the reasoning means the older one
    that still waits."""
    begun = gateway.begin([user("hi")], choices=2)
    numbers = [
        gateway.end(begun, f"<think>{thought}</think>Yes<|end|>", choice=choice)
        for choice, thought in enumerate(("one", "two"))
    ]
    if not sends_reasoning and continued:
        gateway.talk([user("hi"), assistant("Yes"), user("w")], "no<|end|>")
    repeated = assistant(
        "Yes", **({"reasoning_content": ("one", "two")[continued]} if sends_reasoning else {})
    )
    third = gateway.talk([user("hi"), repeated, user("x")], "no<|end|>")
    turn = gateway.turn(third)
    assert (turn.parent, turn.reason) == (numbers[continued], "")
    prompt, sampled = gateway.sampled[numbers[continued]]
    assert gateway.sampled[third][0][: turn.shared] == prompt + sampled
    fourth = gateway.talk(
        [user("hi"), assistant("Yes"), user("x"), assistant("no"), user("y")], "well<|end|>"
    )
    assert gateway.turn(fourth).parent == third
    assert gateway.turn(fourth).reason == "", "what is repeated further back is what the turn before has seen"


@pytest.mark.parametrize("continued", [0, 1])
def test_of_equal_calls_those_with_the_ids_that_the_client_repeats_are_meant(gateway, continued):
    begun = gateway.begin([user("hi")], choices=2)
    function = {"name": "f", "arguments": {"a": 1}}
    numbers = [
        gateway.end(
            begun,
            f"{written_call(function)}<|end|>",
            choice=choice,
            message=assistant("", tool_calls=[{"id": f"call-{choice}", "function": function}]),
        )
        for choice in (0, 1)
    ]
    repeated = assistant("", tool_calls=[{"id": f"call-{continued}", "function": function}])
    third = gateway.talk([user("hi"), repeated, tool("1")], "no<|end|>")
    assert gateway.turn(third).parent == numbers[continued]
    assert gateway.next_states() == {numbers[continued]: ["1"]}


def test_reasoning_that_the_client_sends_counts_where_nothing_is_known(gateway):
    gateway.talk([user("hi")], "<think>one</think>Yes<|end|>", session="s")
    history = [user("other"), assistant("Yes", reasoning_content="two"), user("x")]
    begun = gateway.begin(history, session="s")
    assert decode(begun.input_ids) == ChatTemplate().render(history, answer=True)


@pytest.mark.parametrize("first", ["<think>one</think>ok<|end|>", "ok<|end|>"])
def test_reasoning_of_equal_answers_is_not_mixed_up_where_nothing_is_known(gateway, first):
    gateway.talk([user("a")], "<think>two</think>well<|end|>", session="s")
    gateway.talk([user("b")], first, session="s")
    gateway.talk([user("c")], "<think>three</think>ok<|end|>", session="s")
    history = [user("other"), assistant("well"), user("x"), assistant("ok"), user("y")]
    begun = gateway.begin(history, session="s")
    known = [history[0], assistant("well", reasoning_content="two"), *history[2:]]
    assert decode(begun.input_ids) == ChatTemplate().render(known, answer=True)


def test_blanks_that_the_server_has_stripped_begin_a_branch(gateway):
    begun = gateway.begin([user("hi")])
    first = gateway.end(begun, "well \n<|end|>", message=assistant("well"))
    second = gateway.talk([user("hi"), assistant("well"), user("x")], "y<|end|>")
    turn = gateway.turn(second)
    assert decode(gateway.sampled[second][0]).endswith(
        "<|assistant|>well<|end|><|user|>x<|end|><|assistant|>"
    )
    assert turn.parent == first and turn.shared == len(begun.input_ids) + len(encode("well"))
    assert turn.reason == "template"


def test_thinking_that_the_template_removes_begins_a_branch_at_the_first_difference(gateway):
    template = ChatTemplate(thinking="last")
    first = gateway.talk([user("hi")], "<think>so</think>Yes<|end|>", template=template)
    second = gateway.talk([user("hi"), assistant("Yes"), user("x")], "no<|end|>", template=template)
    turn = gateway.turn(second)
    assert turn.reason == "thinking removed" and turn.parent == first
    assert turn.shared == len(gateway.sampled[first][0])
    assert turn.kept == 2, "the messages are all repeated"
    assert decode(gateway.sampled[second][0]) == template.render(
        [user("hi"), assistant("Yes"), user("x")], answer=True
    )
    assert gateway.next_states() == {first: ["x"]}


def test_a_prompt_that_opens_thinking_is_shared_up_to_there(gateway):
    template = ChatTemplate(thinking="last", opens_thinking=True)
    answer = encode("so</think>Yes<|end|>")
    message = assistant("Yes", reasoning_content="so")
    begun = gateway.begin([user("hi")], template=template)
    gateway.end(begun, answer, message=message)
    second = gateway.talk([user("hi"), assistant("Yes"), user("x")], "no<|end|>", template=template)
    assert gateway.turn(second).reason == "thinking removed"
    assert gateway.turn(second).shared == len(begun.input_ids) - len(encode("<think>"))


def test_calls_that_the_template_writes_otherwise_begin_a_branch(gateway):
    template = ChatTemplate(spaced_calls=True)
    function = {"name": "f", "arguments": {"a": 1}}
    first = gateway.talk([user("hi")], f"{written_call(function)}<|end|>", template=template)
    messages = [user("hi"), assistant("", tool_calls=[{"function": function}]), tool("1")]
    second = gateway.talk(messages, "no<|end|>", template=template)
    turn, (prompt, sampled) = gateway.turn(second), gateway.sampled[first]
    assert turn.reason == "calls re-serialized"
    assert turn.shared == len(prompt) + len(encode('<call>{"name":')), "the sampled ids before it are kept"
    assert gateway.sampled[second][0][: turn.shared] == (prompt + sampled)[: turn.shared]


def test_other_tools_begin_a_branch(gateway):
    gateway.talk([user("hi")], "a<|end|>", template=ChatTemplate(tools="one"))
    second = gateway.talk(
        [user("hi"), assistant("a"), user("x")], "b<|end|>", template=ChatTemplate(tools="two")
    )
    assert gateway.turn(second).reason == "template"
    assert gateway.turn(second).shared == len(encode("<|system|>"))


def test_a_rewritten_answer_begins_a_branch_where_it_differs_and_is_nobodys_next_state(gateway):
    first = gateway.talk([user("hi")], "the cat<|end|>", session="s")
    second = gateway.talk([user("hi"), assistant("the dog"), user("x")], "b<|end|>", session="s")
    turn = gateway.turn(second)
    assert (turn.parent, turn.reason, turn.kept) == (first, "history rewritten", 1)
    assert turn.shared == len(gateway.sampled[first][0]) + len(encode("the "))
    assert gateway.next_states() == {}


def test_a_rewritten_system_message_still_pairs_the_answer_that_is_repeated(gateway):
    def system(text):
        return {"role": "system", "content": text}

    first = gateway.talk([system("at 10:01"), user("hi")], ODD, session="s")
    messages = [system("at 10:02"), user("hi"), assistant("Hello"), user("x")]
    second = gateway.talk(messages, "b<|end|>", session="s")
    assert (gateway.turn(second).parent, gateway.turn(second).reason) == (first, "history rewritten")
    assert gateway.turn(second).shared == len(encode("<|system|>at 10:0"))
    assert gateway.next_states() == {first: ["x"]}


def test_an_equal_answer_in_another_conversation_is_not_the_turn_before(gateway):
    gateway.talk([user("hi")], "ok<|end|>", session="s")
    gateway.talk([user("something else")], "well<|end|>", session="s")
    second = gateway.talk([user("other"), assistant("ok"), user("x")], "b<|end|>", session="s")
    assert (gateway.turn(second).parent, gateway.turn(second).reason) == (None, "new conversation")
    assert gateway.next_states() == {}


def test_a_branch_that_goes_on_through_a_side_turn_is_continued_once(gateway):
    history = [user("hi"), assistant("Hello")]
    gateway.talk([user("hi")], ODD, session="s")
    side = [*history, user("x")]
    gateway.talk(side, "b<|end|>", session="s", sampling={"temperature": 0.5})
    through = gateway.talk([*side, assistant("b"), user("y")], "c<|end|>", session="s")
    beside = gateway.talk([*history, user("z")], "d<|end|>", session="s")
    assert [gateway.turn(number).reason for number in (through, beside)] == ["", "fork"]


def test_a_second_continuation_of_a_turn_is_a_fork_and_not_its_next_state(gateway):
    first = gateway.talk([user("hi")], ODD)
    history = [user("hi"), assistant("Hello")]
    second = gateway.talk([*history, user("x")], "b<|end|>")
    third = gateway.talk([*history, user("y")], "c<|end|>")
    assert [gateway.turn(number).reason for number in (second, third)] == ["", "fork"]
    assert gateway.turn(third).parent == first
    assert gateway.turn(third).shared == gateway.turn(second).shared
    assert gateway.next_states() == {first: ["x"]}
    assert gateway.sessions.counters.unpaired == 1


def test_concurrent_requests_get_their_own_next_states(gateway):
    history = [user("hi"), assistant("Hello")]
    first = gateway.talk([user("hi")], ODD)
    left, right = gateway.begin([*history, user("l")]), gateway.begin([*history, user("r")])
    right_turn = gateway.end(right, "the right<|end|>")
    left_turn = gateway.end(left, "the left<|end|>")
    gateway.begin([*history, user("l"), assistant("the left"), user("l2")])
    gateway.begin([*history, user("r"), assistant("the right"), user("r2")])
    assert gateway.next_states() == {first: ["l"], left_turn: ["l2"], right_turn: ["r2"]}


def test_a_next_state_that_comes_before_the_end_of_the_answer_is_paired_at_its_end(gateway):
    running = gateway.begin([user("hi")], session="s")
    early = gateway.begin([user("hi"), assistant("Hell"), user("stop")], session="s")
    assert gateway.next_states() == {}
    first = gateway.end(running, ODD)
    second = gateway.end(early, "ok<|end|>")
    assert gateway.next_states() == {first: ["stop"]}
    assert gateway.turn(second).reason == "unfinished"


def test_of_two_running_answers_to_one_prompt_a_common_beginning_tells_nothing(gateway):
    one, two = (gateway.begin([user("hi")], session="s") for _ in range(2))
    gateway.begin([user("hi"), assistant("Hell"), user("x")], session="s")
    gateway.begin([user("hi"), assistant("Hello"), user("y")], session="s")
    gateway.end(one, "Help<|end|>")
    second = gateway.end(two, ODD)
    gateway.append(gateway.sessions.sweep(gateway.now))
    assert gateway.next_states() == {second: ["y"]}


def test_a_next_state_of_a_turn_that_has_ended_does_not_wait_for_an_equal_one_that_runs(gateway):
    first = gateway.talk([user("hi")], ODD, session="s")
    again = gateway.begin([user("hi")], session="s")
    gateway.begin([user("hi"), assistant("Hello"), user("x")], session="s")
    second = gateway.end(again, ODD)
    gateway.append(gateway.sessions.sweep(gateway.now))
    assert gateway.next_states() == {first: ["x"]}
    gateway.begin([user("hi"), assistant("Hello"), user("y")], session="s")
    assert gateway.next_states() == {first: ["x"], second: ["y"]}, "the equal answer has waited for its own"


@pytest.mark.parametrize("rewritten", ["i", ""])
def test_a_rewritten_answer_of_one_token_is_not_repeated_after_a_restart(gateway, rewritten):
    first = gateway.talk([user("hi")], "h", session="s")
    second = gateway.talk([user("hi"), assistant(rewritten), user("x")], ODD, session="s")
    assert gateway.turn(second).shared == len(gateway.sampled[first][0])
    messages = [user("hi"), assistant(rewritten), user("x"), assistant("Hello"), user("y")]
    prompt = gateway.begin(messages, session="s").input_ids
    gateway.restart()
    assert gateway.begin(messages, session="s").input_ids == prompt
    assert prompt[: len(gateway.sampled[second][0])] == gateway.sampled[second][0]


def test_a_side_turn_is_no_next_state_and_does_not_take_the_branch(gateway):
    first = gateway.talk([user("hi")], ODD, session="s")
    history = [user("hi"), assistant("Hello")]
    side = gateway.begin([*history, user("title?")], session="s", turn_type=TurnType.SIDE)
    assert (side.turn_type, side.reason) == (TurnType.SIDE, "")
    gateway.end(side, "Greetings<|end|>")
    second = gateway.talk([*history, user("x")], "b<|end|>", session="s")
    assert gateway.turn(second).reason == ""
    assert gateway.next_states() == {first: ["x"]}


def test_sampling_that_cannot_be_reproduced_makes_a_side_turn_with_its_reason(gateway):
    begun = gateway.begin([user("hi")], sampling={"temperature": 0.2, "regex": "a"})
    turn = gateway.turn(gateway.end(begun, ODD))
    assert (turn.turn_type, turn.reason) == (TurnType.SIDE, "temperature, regex")
    assert begun.sampling == {"temperature": 0.2, "regex": "a"}
    assert gateway.sessions.counters.side == {"temperature": 1, "regex": 1}


def test_the_recipes_sampling_takes_the_place_of_the_clients_on_main_turns_only():
    gateway = Gateway(override=True)
    main = gateway.begin([user("hi")], sampling={"temperature": 0.2, "regex": "a", "stop": ["x"]})
    assert (main.turn_type, main.sampling) == (TurnType.MAIN, {"temperature": 1.0, "stop": ["x"]})
    side = gateway.begin([user("hi")], sampling={"temperature": 0.2}, user=User("k", None, TurnType.SIDE))
    assert (side.turn_type, side.sampling) == (TurnType.SIDE, {"temperature": 0.2})
    assert gateway.sessions.counters.overridden == 1


@pytest.mark.parametrize(
    ("flaw", "reason"),
    [
        ({"logprobs": [-1.0] * 5}, "log-probs missing"),
        ({"logprobs": [float("nan")] * 6}, "log-probs missing"),
        ({"logprobs": [0.5] * 6}, "log-probs missing"),
        ({"spans": [(1, 5)]}, "versions missing"),
        ({"spans": [(1, 6), (2, 0)]}, "versions missing"),
        ({"finish": None}, "cut off"),
        ({"tokens": [], "logprobs": [], "spans": []}, "no tokens"),
    ],
)
def test_a_turn_that_lacks_anything_is_recorded_and_not_trained(gateway, flaw, reason):
    number = gateway.end(gateway.begin([user("hi")]), ODD, **flaw)
    turn = gateway.turn(number)
    assert (turn.turn_type, turn.reason) == (TurnType.SIDE, reason)
    (chunk,) = decode_chunks(gateway.journal[number - 1].chunk)
    assert len(chunk.tokens) == len(chunk.logprobs) == sum(count for _, count in turn.spans)
    ids = [*gateway.sampled[number][0], *flaw.get("tokens", ODD)]
    assert [*chunk.context, *chunk.tokens] == ids


def test_a_cancelled_turn_is_recorded_and_the_next_one_continues_the_branch_before_it(gateway):
    first = gateway.talk([user("hi")], ODD, session="s")
    history = [user("hi"), assistant("Hello")]
    gateway.end(gateway.begin([*history, user("x")], session="s"), "Well, <|end|>"[:5], cancelled=True)
    second = gateway.talk([*history, user("y")], "b<|end|>", session="s")
    assert gateway.turn(second).reason == ""
    turns = recorded_turns(gateway)
    assert branches_of(turns).members(second) == [first, second]
    assert gateway.sessions.counters.turns == {"main": 2, "cancelled": 1}


def test_an_interrupted_answer_that_is_repeated_stays_in_the_prompt_without_loss(gateway):
    begun = gateway.begin([user("hi")], session="s")
    first = gateway.end(begun, "the<|end|>"[:3], cancelled=True)
    second = gateway.talk([user("hi"), assistant("the"), user("y")], "b<|end|>", session="s")
    assert gateway.turn(second).parent == first and gateway.turn(second).reason == ""
    turns = recorded_turns(gateway)
    branch = rebuild(turns, second, branches_of(turns).members(second))
    assert branch.trajectory.tokens_T[branch.trajectory.loss_mask_T].tolist() == encode("b<|end|>")


def recorded_turns(gateway: Gateway) -> dict[int, RecordedTurn]:
    return {
        number: RecordedTurn(item, item.chunk)
        for number, item in enumerate(gateway.journal, 1)
        if isinstance(item, Turn)
    }


def test_several_choices_are_turns_of_one_prompt(gateway):
    begun = gateway.begin([user("hi")], choices=3)
    numbers = [gateway.end(begun, f"{place}<|end|>", choice=place) for place in (2, 0, 1)]
    with pytest.raises(ValueError, match="choice 1 has ended"):
        gateway.end(begun, ODD, choice=1)
    gateway.begin([user("hi"), assistant("0"), user("x")])
    assert gateway.next_states() == {numbers[1]: ["x"]}


def test_a_retry_joins_the_running_turn_and_nothing_else_does(gateway):
    begun = gateway.begin([user("hi")], digest=b"d")
    joined = gateway.sessions.begin(gateway.arrival([user("hi")], digest=b"d", retries=1))
    assert joined is begun
    for changes in (
        {"retries": 0},
        {"retries": 1},
        {"retries": 2, "digest": b"e"},
        {"retries": 2, "user": User("other")},
        {"retries": 2, "session": "named"},
    ):
        begin = gateway.sessions.begin(gateway.arrival([user("hi")], **({"digest": b"d"} | changes)))
        assert begin is not begun, changes
        gateway.end(begin, ODD)
    gateway.end(begun, ODD)
    assert gateway.sessions.begin(gateway.arrival(digest=b"d", retries=3)) is not begun


def test_a_retry_joins_none_of_two_equal_requests(gateway):
    equal = [gateway.begin([user("hi")], digest=b"d") for _ in range(2)]
    assert gateway.sessions.begin(gateway.arrival(digest=b"d", retries=1)) not in equal


def test_a_named_session_belongs_to_a_key(gateway):
    gateway.talk([user("hi")], ODD, session="s", user=User("alice"))
    begun = gateway.begin([user("hi"), assistant("Hello"), user("x")], session="s", user=User("bob"))
    assert gateway.turn(gateway.end(begun, ODD)).parent is None
    assert gateway.next_states() == {}
    assert gateway.sessions.sessions == 2


def test_a_key_made_for_one_session_names_it_unless_the_request_does(gateway):
    holder = User("key", session="mine")
    assert gateway.begin([user("hi")], user=holder).session == "mine"
    assert gateway.begin([user("hi")], user=holder, session="s").session == "s"


def test_clients_without_a_name_never_share_a_session(gateway):
    one = gateway.begin([user("hi")])
    two = gateway.begin([user("hi")])
    assert one.session != two.session
    gateway.end(one, ODD)
    gateway.end(two, ODD)
    history = [user("hi"), assistant("Hello")]
    sessions = [gateway.begin([*history, user("x")]).session for _ in range(3)]
    assert sessions[:2] == [one.session, two.session], "each waits for one next state"
    assert sessions[2] not in sessions[:2], "nobody can tell whose it is"
    assert gateway.sessions.counters.ambiguous == 1
    assert gateway.begin([*history, user("x")], user=User("other")).session not in sessions


def test_the_longest_history_places_a_request(gateway):
    one = gateway.begin([user("hi")])
    gateway.end(one, ODD)
    history = [user("hi"), assistant("Hello")]
    gateway.talk([*history, user("x")], "b<|end|>", session=one.session)
    gateway.talk([user("hi")], ODD, session="named")
    assert gateway.begin([*history, user("x"), assistant("b"), user("y")]).session == one.session


def named(gateway, request, *, key="key"):
    return gateway.sessions.answer_of(User(key), request)


def test_an_answer_is_named_by_its_key_alone_also_after_a_kill(gateway):
    begun = gateway.begin([user("hi")], request="1")
    assert named(gateway, "1") is None, "it has not ended"
    first = gateway.end(begun, ODD, exchange=b'{"a": 1}')
    second = gateway.end(
        gateway.begin([user("x")], request="2", previous="1", session=begun.session), ODD, exchange=b"{}"
    )
    gateway.end(gateway.begin([user("y")], request="3", session=begun.session), ODD)
    for _ in range(2):
        assert named(gateway, "1") == NamedAnswer(begun.session, first, "")
        assert named(gateway, "2") == NamedAnswer(begun.session, second, "1")
        assert named(gateway, "1", key="other") is named(gateway, "3") is None
        gateway.restart()
    assert bytes(gateway.turn(first).exchange) == b'{"a": 1}'


def test_an_answer_has_no_name_any_more_when_its_session_has_ended_or_is_forgotten(gateway):
    for request, how in (("1", "end"), ("2", "forget"), ("3", "done")):
        begun = gateway.begin([user(request)], request=request, ends_session=how == "done")
        gateway.end(begun, ODD, exchange=b"{}")
        if how == "end":
            gateway.append(gateway.sessions.end_session(User("key"), begun.session))
        elif how == "forget":
            gateway.append(gateway.sessions.forget(begun.session, "key"))
        assert named(gateway, request) is None
    gateway.restart()
    assert [named(gateway, request) for request in "123"] == [None] * 3


def test_an_evicted_session_keeps_the_names_of_its_answers():
    gateway = Gateway(limits=SessionLimits(1000, 1, 1800.0))
    number = gateway.end(gateway.begin([user("hi")], request="1"), ODD, exchange=b"{}")
    gateway.talk([user("x" * 50)], ODD)
    assert gateway.sessions.counters.evicted_histories
    assert named(gateway, "1").turn == number


def test_a_prefilled_answer_may_be_repeated_in_one_piece(gateway):
    class Continuing(ChatTemplate):
        def render(self, messages, *, answer):
            if messages[-1]["role"] == "assistant":
                text = super().render(messages, answer=False)
                return text.removesuffix("<|end|>")
            return super().render(messages, answer=answer)

    first = gateway.talk([user("hi"), assistant("The ")], "cat<|end|>", template=Continuing())
    second = gateway.talk([user("hi"), assistant("The cat"), user("x")], "b<|end|>", template=Continuing())
    assert gateway.turn(second).parent == first and gateway.turn(second).reason == ""
    assert gateway.next_states() == {first: ["x"]}
    assert messages_of_turn({n: t.turn for n, t in recorded_turns(gateway).items()}, second) == [
        user("hi"),
        assistant("The cat"),
        user("x"),
    ]


def test_a_request_of_ids_continues_by_ids_within_its_session(gateway):
    first = gateway.talk((), ODD, session="s", prompt_ids=encode("Question"))
    begun = gateway.begin((), session="s", prompt_ids=[*encode("Question"), *ODD, *encode("ok")])
    assert gateway.turn(gateway.end(begun, ODD)).parent == first
    assert gateway.next_states() == {first: ["ok"]}
    other = gateway.begin((), session="s", prompt_ids=encode("Quite another"))
    assert other.input_ids == encode("Quite another")
    assert gateway.turn(gateway.end(other, ODD)).reason == "new conversation"
    assert gateway.begin((), prompt_ids=encode("Question")).session != "s"


def test_a_request_of_text_continues_by_text_and_keeps_the_sampled_ids(gateway):
    first = gateway.talk((), ODD, session="s", text="Question")
    begun = gateway.begin((), session="s", text="QuestionHello<|end|>more")
    assert begun.input_ids == [*gateway.sampled[first][0], *ODD, *encode("more")]


def test_the_last_request_of_a_session_ends_it_after_its_answer(gateway):
    gateway.talk([user("hi")], ODD, session="s")
    last = gateway.begin([user("hi"), assistant("Hello"), user("x")], session="s", ends_session=True)
    assert not ends(gateway)
    number = gateway.end(last, "b<|end|>")
    assert ends(gateway) == [SessionEnd("s", "key")]
    gateway.append(gateway.sessions.reward(User("key"), ClientReward(value=0.5, session="s")).entries)
    assert gateway.journal[-1] == UserReward(number, 0.5)
    again = gateway.begin([user("hi"), assistant("Hello"), user("z")], session="s")
    assert gateway.turn(gateway.end(again, ODD)).parent is None
    assert len(gateway.next_states()) == 1


def ends(gateway: Gateway) -> list[SessionEnd]:
    return [item for item in gateway.journal if isinstance(item, SessionEnd)]


def test_a_session_ends_when_it_has_been_idle_but_not_while_it_runs(gateway):
    gateway.talk([user("hi")], ODD, session="s")
    running = gateway.begin([user("hi")], session="r")
    gateway.append(gateway.sessions.sweep(gateway.now + 1798))
    assert not ends(gateway)
    gateway.append(gateway.sessions.sweep(gateway.now + 1801))
    assert ends(gateway) == [SessionEnd("s", "key")]
    assert gateway.sessions.sessions == 1 and gateway.sessions.counters.ended == {"idle": 1}
    gateway.end(running, ODD)


@pytest.mark.parametrize("set_by_s", [-1e6, 1e6])
def test_a_session_rests_as_long_as_time_passes_however_the_wall_clock_is_set(set_by_s, monkeypatch, gateway):
    wall_s, passed_s = [time.time()], [time.monotonic()]
    monkeypatch.setattr(time, "time", lambda: wall_s[0])
    monkeypatch.setattr(time, "monotonic", lambda: passed_s[0])
    gateway.now = steady_s()
    gateway.talk([user("hi")], ODD, session="s")
    wall_s[0] += set_by_s
    passed_s[0] += 1790
    assert not gateway.sessions.sweep(steady_s())
    passed_s[0] += 20
    assert gateway.sessions.sweep(steady_s()) == [SessionEnd("s", "key")]


@pytest.mark.parametrize("set_by_s", [-1e6, 1e6])
def test_a_restart_begins_the_rest_of_sessions_anew_whatever_the_clock_of_the_journal_was(gateway, set_by_s):
    gateway.talk([user("hi")], ODD, session="s")
    gateway.now += set_by_s
    gateway.restart()
    assert not gateway.sessions.sweep(gateway.now + 1799)
    assert gateway.sessions.sweep(gateway.now + 1801) == [SessionEnd("s", "key")]


def test_rewards_name_turns_by_their_place_in_the_session(gateway):
    numbers = [gateway.talk([user(text)], ODD, session="s") for text in "ab"]
    gateway.append(gateway.sessions.reward(User("key"), ClientReward(value=1.0, session="s", turn=0)).entries)
    assert gateway.journal[-1] == UserReward(numbers[0], 1.0)
    for session, turn in (("s", 2), ("s", -1), ("other", None)):
        with pytest.raises(UnknownTurn):
            gateway.sessions.reward(User("key"), ClientReward(value=1.0, session=session, turn=turn))
    with pytest.raises(UnknownTurn):
        gateway.sessions.reward(User("other"), ClientReward(value=1.0, session="s", turn=0))
    for reward in (float("nan"), -1e39):
        with pytest.raises(ValueError, match="expected a finite number of float32"):
            gateway.sessions.reward(User("key"), ClientReward(value=reward, session="s", turn=0))


def test_what_is_forgotten_leaves_no_trace_and_running_answers_are_not_recorded(gateway):
    gateway.talk([user("hi")], ODD, session="s")
    running = gateway.begin([user("hi"), assistant("Hello"), user("x")], session="s")
    gateway.append(gateway.sessions.forget("s", None))
    assert gateway.journal[-1] == Forgotten("s", None)
    count = len(gateway.journal)
    with pytest.raises(AssertionError):
        gateway.end(running, ODD)  # it finds no entry of a turn
    assert len(gateway.journal) == count
    assert gateway.sessions.sessions == 0 and gateway.sessions.size == 0
    gateway.restart()
    assert gateway.sessions.sessions == 0


def test_a_prompt_without_room_for_an_answer_is_refused_and_leaves_nothing(gateway):
    gateway.talk([user("hi")], ODD, session="s")
    history = [user("hi"), assistant("Hello"), user("more")]
    length = len(gateway.begin(history, session="s").input_ids)
    entries, sessions = len(gateway.journal), gateway.sessions.sessions
    for session in ("s", "new"):
        arrival = gateway.arrival(history, session=session, most_tokens=length - 3)
        with pytest.raises(PromptTooLong) as refused:
            gateway.sessions.begin(arrival)
        assert refused.value.tokens >= length - 2
    assert (len(gateway.journal), gateway.sessions.sessions) == (entries, sessions)
    assert gateway.begin(history, session="s", most_tokens=length).input_ids


def test_a_refused_prompt_leaves_nothing(gateway):
    class Refusing(ChatTemplate):
        def render(self, messages, *, answer):
            raise ValueError("no such role")

    gateway.talk([user("hi")], "<think>so</think>Yes<|end|>")
    count = gateway.sessions.sessions
    arrival = gateway.arrival([user("hi"), assistant("Yes"), user("x")])
    with pytest.raises(ValueError, match="no such role"):
        gateway.sessions.begin(type(arrival)(**{**fields(arrival), "template": Refusing()}))
    assert gateway.sessions.sessions == count


def fields(arrival):
    return {name: getattr(arrival, name) for name in arrival.__dataclass_fields__}


def test_an_evicted_session_still_gets_its_next_state_and_begins_a_branch():
    gateway = Gateway(SessionLimits(1000, 20_000, 1800.0))
    first = gateway.talk([user("hi")], ODD)
    for place in range(20):
        gateway.talk([user(f"{place}" * 100)], f"{place}<|end|>")
    counters = gateway.sessions.counters
    assert gateway.sessions.size <= 20_000
    assert counters.evicted_histories and counters.evicted_tokens > len(ODD)
    assert gateway.sessions.sessions == 21, "each has a turn that waits for its next state"
    begun = gateway.begin([user("hi"), assistant("Hello"), user("x")])
    assert begun.session == gateway.turn(first).session
    second = gateway.turn(gateway.end(begun, "b<|end|>"))
    assert (second.parent, second.reason) == (None, "evicted")
    assert gateway.next_states() == {first: ["x"]}


def test_a_session_with_a_turn_that_waits_is_never_evicted_for_another():
    gateway = Gateway(SessionLimits(2, 1 << 30, 1800.0))
    gateway.talk([user("a")], ODD, session="a")
    gateway.end(gateway.begin([user("b")], session="b", turn_type=TurnType.SIDE), ODD)
    gateway.talk([user("c")], ODD, session="c")
    assert ends(gateway) == [SessionEnd("b", "key")], "its side turn waits for nothing"
    for _ in range(3):
        with pytest.raises(TooManySessions, match="2 sessions of this key are open") as caught:
            gateway.begin([user("d")], session="d")
        assert 1700 < caught.value.retry_after_s < 1800, "until the first of its sessions is idle"
    assert gateway.sessions.counters.refused == 3
    gateway.talk([user("a"), assistant("Hello"), user("x")], ODD, session="a", ends_session=True)
    gateway.talk([user("d")], ODD, session="d")
    assert gateway.sessions.sessions == 2
    gateway.append(gateway.sessions.sweep(gateway.now + 2000))
    assert gateway.sessions.sessions == gateway.sessions.size == 0


def test_memory_does_not_grow_with_sessions_that_have_ended():
    gateway = Gateway()
    for place in range(300):
        session = f"s{place}"
        gateway.talk([user("hi")], ODD, session=session)
        last = [user("hi"), assistant("Hello"), user("x")]
        gateway.talk(last, "b<|end|>", session=session, ends_session=True)
    gateway.append(gateway.sessions.sweep(gateway.now + 2000))
    state = vars(gateway.sessions)
    table = vars(state["_table"])
    left = {
        name: value for name, value in (state | table).items() if isinstance(value, (dict, list)) and value
    }
    assert not left and gateway.sessions.size == 0


@pytest.mark.parametrize("template", [ChatTemplate(), ChatTemplate(thinking="last")])
def test_a_session_of_300_turns_encodes_each_text_a_few_times_only(gateway, template):
    messages = []
    text = "a rather long question " * 5
    for place in range(300):
        messages.append(user(f"{text}{place}"))
        gateway.talk(messages, f"<think>so {place}</think>answer {place}<|end|>", template=template)
        messages.append(assistant(f"answer {place}"))
    assert template.rendered <= 4 * 300 * len(text)
    turns = recorded_turns(gateway)
    last = max(turns)
    branch = rebuild(turns, last, branches_of(turns).members(last))
    kept = template.thinking == "keep"
    assert len(branch.turns) == (300 if kept else 1)
    assert branch.trajectory.tokens_T.tolist() == [*np.concatenate(gateway.sampled[last])]
    written = sum(len(turn.chunk) for turn in turns.values())
    assert written < 30 * len(branch.trajectory.tokens_T), "entries hold what is new only"


def test_the_template_is_not_encoded_again_in_a_conversation_it_only_appends_to(gateway):
    template = ChatTemplate()
    messages = [user("x" * 5000)]
    gateway.talk(messages, ODD, template=template)
    before = template.rendered
    gateway.talk([*messages, assistant("Hello"), user("y")], ODD, template=template)
    assert template.rendered - before == len("<|user|>y<|end|><|assistant|>")


def test_a_key_with_many_sessions_makes_room_for_the_others():
    gateway = Gateway(SessionLimits(4, 1 << 30, 1800.0))
    for name in ("a", "b", "c", "d"):
        gateway.talk([user(name)], ODD, session=name)
    for name, expected in (("x", "a"), ("y", "b")):
        gateway.talk([user(name)], ODD, session=name, user=User("newcomer"))
        assert ends(gateway)[-1] == SessionEnd(expected, "key"), "what has rested longest is judged as it is"
    with pytest.raises(TooManySessions, match="2 sessions of this key"):
        gateway.begin([user("z")], session="z", user=User("newcomer"))
    with pytest.raises(TooManySessions, match="2 sessions of this key"):
        gateway.begin([user("e")], session="e")
    gateway.talk([user("w")], ODD, session="w", user=User("third"))


def test_a_key_may_hold_as_many_sessions_as_its_quota_says():
    gateway = Gateway(SessionLimits(1000, 1 << 30, 1800.0, per_key=2))
    gateway.end(gateway.begin([user("a")], session="a", turn_type=TurnType.SIDE), ODD)
    gateway.talk([user("b")], ODD, session="b")
    gateway.talk([user("c")], ODD, session="c")
    assert ends(gateway) == [SessionEnd("a", "key")]
    with pytest.raises(TooManySessions):
        gateway.begin([user("d")], session="d")
    gateway.talk([user("d")], ODD, session="d", user=User("another"))


def test_the_key_with_the_most_memory_loses_its_histories_first():
    gateway = Gateway(SessionLimits(1000, 20_000, 1800.0))
    gateway.talk([user("small")], ODD, session="s", user=User("small"))
    for place in range(12):
        gateway.talk([user("large" * 300)], ODD, session=f"l{place}")
    assert gateway.sessions.counters.evicted_histories > 0
    again = [user("small"), assistant("Hello"), user("x")]
    begun = gateway.begin(again, session="s", user=User("small"))
    assert gateway.turn(gateway.end(begun, "b<|end|>")).parent is not None


def test_helpers_are_side_turns_with_their_kind_as_the_reason():
    gateway = Gateway()
    begun = gateway.begin([user("a")], turn_type=TurnType.SIDE, side_reason="helper: title")
    assert gateway.turn(gateway.end(begun, ODD)).reason == "helper: title"
    assert gateway.sessions.counters.side == {"helper: title": 1}
