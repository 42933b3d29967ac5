"""Random conversations: each sampled id counts once, ids are what the engine saw, a restart loses nothing.

The oracle knows only what the engine was asked and what it sampled; it shares no code with sessions.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.gateway.source import Finished
from slipstream.rollout.tokens.record import decode_chunks
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish
from slipstream.rollout.tokens.turn_entries import TurnType
from tests.tries import tries
from tests.unit.branches import RecordedTurn, branches_of, messages_of_turn, rebuild
from tests.unit.talking import (
    END,
    PAIRS,
    ChatTemplate,
    Gateway,
    assistant,
    decode,
    encode,
    parsed,
    tool,
    user,
    written_call,
)
from tests.unit.test_sessions import recorded_turns

TEXTS = st.text(st.sampled_from('hetlink é€{":}< k'), min_size=1, max_size=8)
IDS = st.lists(st.sampled_from([*b"hetl in", *"é€".encode(), *PAIRS]), min_size=1, max_size=10)
ARGUMENTS = st.dictionaries(st.sampled_from("ab"), st.integers(0, 9) | st.booleans() | TEXTS, max_size=2)
TEMPLATES = st.sampled_from(
    [
        ChatTemplate(),
        ChatTemplate(thinking="last"),
        ChatTemplate(spaced_calls=True),
        ChatTemplate(thinking="last", opens_thinking=True),
        ChatTemplate(opens_thinking=True),
    ]
)


@dataclass
class Client:
    """One conversation, as its client holds it."""

    session: str | None
    messages: list[dict[str, Any]] = field(default_factory=list)


@st.composite
def answers(draw, template: ChatTemplate):
    """Return sampled ids, how they ended, and the message that the client gets."""
    ids: list[int] = [] if template.opens_thinking else draw(st.sampled_from([[], encode("<think>")]))
    if template.opens_thinking or ids:
        ids = [*ids, *draw(IDS), *encode("</think>")]
    ids = [*ids, *draw(IDS)]
    if draw(st.booleans()):
        function = {"name": "f", "arguments": draw(ARGUMENTS)}
        ids = [*ids, *encode(written_call(function))]
    ending = draw(st.sampled_from(["end", "end", "length", "stop", "cancelled"]))
    text = decode(ids)
    if ending == "end":
        ids = [*ids, END]
    finish = Finished(Finish.STOP, END) if ending == "end" else Finished(Finish.LENGTH)
    if ending == "stop":
        ids = [*ids, *encode("stop")]
        finish = Finished(Finish.STOP, "stop")
    message = parsed(("<think>" if template.opens_thinking else "") + text)
    return ids, finish, message, ending == "cancelled"


def added(draw, client: Client) -> list[dict[str, Any]]:
    if client.messages and client.messages[-1].get("tool_calls") and draw(st.booleans()):
        return [tool(draw(TEXTS)) for _ in client.messages[-1]["tool_calls"]]
    return [user(draw(TEXTS | st.builds(lambda text: [{"type": "text", "text": text}], TEXTS)))]


def repeated(draw, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as some client may send it again."""
    copy = deepcopy(dict(reversed(message.items())) if draw(st.booleans()) else message)
    if draw(st.booleans()):
        copy.pop("reasoning_content", None)
    for call in copy.get("tool_calls", ()):
        call["id"] = draw(st.sampled_from(["x", "y"]))
    return copy


def converse(data, gateway: Gateway, template: ChatTemplate, clients: list[Client], steps: int) -> None:
    """Let clients ask, rewrite, fork and give up; some requests run side by side."""
    running: list[tuple[Any, Client, int]] = []
    for _ in range(steps):
        if running and data.draw(st.booleans()):
            finish(data, gateway, template, *running.pop(data.draw(st.integers(0, len(running) - 1))))
            continue
        client = data.draw(st.sampled_from(clients))
        move = data.draw(st.sampled_from(["on", "on", "on", "rewrite", "back", "new"]))
        if move == "rewrite" and client.messages:
            place = data.draw(st.integers(0, len(client.messages) - 1))
            client.messages[place] = {**client.messages[place], "content": data.draw(TEXTS)}
        elif move == "back":
            del client.messages[data.draw(st.integers(0, len(client.messages))) :]
        elif move == "new":
            client.messages = []
        client.messages = [repeated(data.draw, message) for message in client.messages]
        client.messages += added(data.draw, client)
        begun = gateway.begin(
            [dict(message) for message in client.messages],
            template=template,
            session=client.session,
            sampling=data.draw(st.sampled_from([{}, {}, {"temperature": 0.5}])),
            choices=(choices := data.draw(st.sampled_from([1, 1, 2]))),
            turn_type=data.draw(st.sampled_from([None, None, TurnType.SIDE])),
        )
        running.append((begun, client, choices))
    for item in running:
        finish(data, gateway, template, *item)
    gateway.append(gateway.sessions.sweep(gateway.now))


def finish(data, gateway: Gateway, template: ChatTemplate, begun, client: Client, choices: int) -> None:
    before = list(client.messages)
    for choice in range(choices):
        ids, ended, message, cancelled = data.draw(answers(template))
        versions = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=min(3, len(ids))))
        cuts = np.array_split(np.arange(len(ids)), len(versions))
        spans = [(version, len(cut)) for version, cut in zip(versions, cuts, strict=True)]
        gateway.end(
            begun, ids, choice=choice, finish=ended, message=message, cancelled=cancelled, spans=spans
        )
    client.messages = [*before, message]


def ids_of_entries(turns: dict[int, RecordedTurn], number: int) -> list[int]:
    """Return a turn's prompt and answer as its entries say."""
    turn, chunk = turns[number]
    (part,) = decode_chunks(chunk)
    before = [] if turn.parent is None else ids_of_entries(turns, turn.parent)[: turn.shared]
    assert len(before) == turn.shared
    return [*before, *part.context.tolist(), *part.tokens.tolist()]


def check_against_the_engine(gateway: Gateway) -> None:
    turns = recorded_turns(gateway)
    branches = branches_of(turns)
    counted: dict[tuple[int, int], int] = {}
    last_of: dict[int, int] = {}
    for number in turns:
        members = branches.members(number)
        if members:
            last_of[members[0]] = number
            forks = turns[number].turn.reason == "fork"
            assert not forks or len(members) == 1, "the entry says what its place among the entries says"
    for number, (turn, chunk) in turns.items():
        prompt, sampled = gateway.sampled[number]
        assert ids_of_entries(turns, number) == prompt + sampled
        (part,) = decode_chunks(chunk)
        assert part.tokens.tolist() == sampled
        assert sum(length for _, length in turn.spans) == len(sampled)
    for last in last_of.values():
        branch = rebuild(turns, last, branches.members(last))
        ids, mask = branch.trajectory.tokens_T.tolist(), branch.trajectory.loss_mask_T
        prompt, sampled = gateway.sampled[last]
        assert ids == prompt + sampled
        assert mask.sum() == sum(end - start for _, start, end in branch.turns)
        assert ((branch.trajectory.versions_T == UNSAMPLED) == ~mask).all()
        for number, start, end in branch.turns:
            turn = turns[number].turn
            assert mask[start:end].all()
            assert start == len(gateway.sampled[number][0])
            assert ids[start:end] == gateway.sampled[number][1]
            expected = np.array([-0.5 - place for place in range(end - start)], np.float32)
            assert (branch.trajectory.logprobs_T[start:end] == expected).all()
            versions = [version for version, length in turn.spans for _ in range(length)]
            assert branch.trajectory.versions_T[start:end].tolist() == versions
            for place in range(end - start):
                counted[number, place] = counted.get((number, place), 0) + 1
    trained = {
        (number, place): 1
        for number, (turn, _) in turns.items()
        if turn.turn_type is TurnType.MAIN and not turn.cancelled
        for place in range(len(gateway.sampled[number][1]))
    }
    assert counted == trained, "each sampled id of a trained turn carries loss on one branch"


@tries(27)
@given(st.data(), TEMPLATES, st.integers(1, 14))
def test_each_sampled_id_is_trained_once_as_the_engine_sampled_it(data, template, steps):
    gateway = Gateway()
    clients = [
        Client(session) for session in data.draw(st.sampled_from([(None, None), ("s", "s"), ("s", None)]))
    ]
    converse(data, gateway, template, clients, steps)
    check_against_the_engine(gateway)
    gateway.next_states()


@tries(33)
@given(st.data(), TEMPLATES, st.integers(1, 10))
def test_a_prompt_reads_as_the_template_writes_it(data, template, steps):
    """Ids may be cut otherwise, and may hold what ended an answer; the text is the template's."""
    gateway = Gateway()
    converse(data, gateway, template, [Client("s"), Client("s")], steps)
    turns = recorded_turns(gateway)
    plain = {number: item.turn for number, item in turns.items()}
    for number in turns:
        rendered = template.render(messages_of_turn(plain, number), answer=True)
        text = decode(gateway.sampled[number][0])
        assert text.replace("stop", "").replace("\ufffd", "") == rendered.replace("\ufffd", "")


@tries(33)
@given(st.data(), TEMPLATES, st.integers(1, 10))
def test_sessions_go_on_after_a_kill_as_they_would_have_without(data, template, steps):
    gateway = Gateway()
    clients = [Client("s"), Client("t"), Client(None)]
    converse(data, gateway, template, clients, steps)
    other = Gateway(journal=list(gateway.journal), sampled=dict(gateway.sampled), now=gateway.now)
    other.restart()
    assert other.journal == gateway.journal, "nothing ends by a restart"
    for client in clients:
        for length in range(len(client.messages), 0, -1):
            messages = [*client.messages[:length], user("next")]
            prompts = [
                side.begin([dict(m) for m in messages], template=template, session=client.session or "s")
                for side in (gateway, other)
            ]
            assert prompts[0].input_ids == prompts[1].input_ids
            numbers = [
                side.end(begun, "ok<|end|>") for side, begun in zip((gateway, other), prompts, strict=True)
            ]
            assert numbers[0] == numbers[1]
            ours, theirs = gateway.turn(numbers[0]), other.turn(numbers[1])
            assert (ours.parent, ours.shared, ours.kept, ours.reason) == (
                theirs.parent,
                theirs.shared,
                theirs.kept,
                theirs.reason,
            )
            assert bytes(ours.messages) == bytes(theirs.messages)
    assert gateway.next_states() == other.next_states()
    check_against_the_engine(other)


@tries(33)
@given(st.data(), st.integers(1, 12))
def test_a_next_state_is_what_came_behind_that_answer_in_the_clients_own_history(data, steps):
    """Each answer has a text of its own, so that the oracle reads who reacted to what from the messages."""
    gateway = Gateway()
    expected: dict[int, list[str]] = {}
    number_of: dict[str, int] = {}
    histories: list[list[dict[str, Any]]] = [[]]
    running: list[tuple[Any, list[dict[str, Any]], str]] = []
    for step in range(steps):
        if running and data.draw(st.booleans()):
            begun, messages, name = running.pop(data.draw(st.integers(0, len(running) - 1)))
            number_of[name] = gateway.end(begun, f"{name}<|end|>")
            histories.append([*messages, assistant(name)])
            continue
        history = data.draw(st.sampled_from(histories))
        reaction = [tool(f"u{step}.{place}") for place in range(data.draw(st.integers(1, 2)))]
        if history:
            expected.setdefault(number_of[history[-1]["content"]], [m["content"] for m in reaction])
        messages = [*history, *reaction]
        running.append((gateway.begin(messages, session="s"), messages, f"a{step}."))
    gateway.append(gateway.sessions.sweep(gateway.now))
    assert gateway.next_states() == expected
