"""What a judge is shown: the whole conversation of a turn, as its branch has it, and no other."""

import random

import numpy as np

from slipstream.rollout.control.live_door import TurnEnd
from slipstream.rollout.ledger.storage.database import LedgerError
from slipstream.rollout.live.conversation import history_of, question_of
from slipstream.rollout.reward.live import JudgedTurn, text_of
from slipstream.rollout.tokens.turn_entries import Turn
from tests.unit.branches import messages_of_turn
from tests.unit.test_live_turns import Run, Talk, in_run, number

__all__ = ["in_run"]


def asked(run: Run, entry: int) -> JudgedTurn:
    """What a judge is asked about the turn with this entry."""
    question = run.live.verdicts.question(number(entry))
    assert question is not None
    return question[0]


def texts(messages: list[dict]) -> list[str]:
    return [text_of(message) for message in messages]


def three_turns() -> tuple[Talk, list[int]]:
    talk = Talk()
    first = talk.say(said="one", answer="1")
    second = talk.say(parent=first, said="two", answer="2", kept=2)
    third = talk.say(parent=second, said="three", answer="3", kept=4)
    return talk, [first, second, third]


def test_a_judge_sees_the_messages_and_answers_before_the_turn(in_run):
    talk, (first, second, third) = three_turns()

    async def act(run):
        await run.hear(talk)
        assert asked(run, first).history == []
        assert texts(asked(run, second).history) == ["one", "1"]
        turn = asked(run, third)
        assert texts(turn.history) == ["one", "1", "two", "2"]
        assert texts(turn.messages) == ["three"]
        assert texts(turn.conversation) == ["one", "1", "two", "2", "three", "3"]
        assert [message["role"] for message in turn.conversation] == ["user", "assistant"] * 3
        assert turn.left_out == 0

    in_run(act)

    async def again(run):
        assert texts(asked(run, third).conversation) == ["one", "1", "two", "2", "three", "3"]

    in_run(again)


def test_a_judge_gets_the_ids_of_the_prompt_and_of_the_answer_where_a_teacher_needs_them(in_run):
    talk, (_, second, third) = three_turns()
    fork = talk.say(parent=third, shared=len(talk.branches[second]) - 1, said="a fork")

    async def act(run):
        await run.hear(talk)
        assert asked(run, third).prompt_ids == asked(run, third).answer_ids == b""
        for turn in (second, third, fork):
            question = run.live.verdicts.question(number(turn), with_ids=True)
            assert question is not None
            prompt, answer = (
                np.frombuffer(ids, "<i4").tolist() for ids in (question[0].prompt_ids, question[0].answer_ids)
            )
            assert answer == talk.sampled[turn]
            assert prompt + answer == talk.branches[turn]

    in_run(act)


def test_a_judge_sees_history_as_the_request_has_rewritten_it(in_run):
    talk, (_, second, _) = three_turns()
    fork = talk.say(parent=second, shared=2, said="another two", answer="?", kept=2)
    anew = talk.say(parent=second, shared=0, said="anew", kept=0)

    async def act(run):
        await run.hear(talk)
        assert texts(asked(run, fork).conversation) == ["one", "1", "another two", "?"]
        assert texts(asked(run, anew).conversation) == ["anew", "hi"]

    in_run(act)


def test_conversations_of_random_branches_are_those_that_the_gateway_was_sent(in_run):
    rng = random.Random(1)
    talk = Talk()
    turns: dict[int, Turn] = {}

    def messages_before(entry: int) -> int:
        return len(messages_of_turn(turns, entry)) + 1

    for text in range(60):
        parent = rng.choice([None, *turns]) if turns else None
        kept = rng.randint(0, messages_before(parent)) if parent is not None else 0
        entry = talk.turn(parent, said=f"say {text}", answer=f"answer {text}", kept=kept)
        turns[entry] = talk.entries[entry - 1]
        talk.next(entry)

    async def act(run):
        await run.hear(talk)
        for entry in turns:
            turn = asked(run, entry)
            assert turn.history + turn.messages == messages_of_turn(turns, entry)

    in_run(act)


def test_the_oldest_turns_are_left_out_where_there_is_no_room(in_run):
    talk, (*_, third) = three_turns()

    async def act(run):
        await run.hear(talk)
        known = run.live._table.turns[number(third)]
        stored = len(run.ledger.read(known.parent.said))
        for longest, expected in [(0, []), (stored - 1, []), (stored, ["two", "2"])]:
            turn, _ = question_of(known, run.ledger.read, longest)
            assert texts(turn.history) == expected
            assert turn.left_out == 4 - len(expected)

    in_run(act)


def test_damage_before_a_turn_leaves_out_what_is_older_and_harms_no_turn(in_run):
    talk, (first, second, third) = three_turns()

    async def act(run):
        await run.hear(talk)
        known = run.live._table.turns
        for damage in (LedgerError("damaged"), b"no record"):
            for broken, expected in [(first, ["two", "2"]), (second, [])]:

                def read(refs: bytes, broken=broken, damage=damage) -> bytes:
                    if refs != known[number(broken)].said:
                        return run.ledger.read(refs)
                    if isinstance(damage, bytes):
                        return damage
                    raise damage

                turn, _ = question_of(known[number(third)], read)
                assert texts(turn.history) == expected
                assert turn.left_out == 4 - len(expected)

    in_run(act)


def test_a_judge_never_sees_another_session(in_run):
    """A gateway that named a turn of another session as the parent would have a bug."""
    talk = Talk()
    secret = talk.say(said="secret", session="another")
    wrong = talk.say(parent=secret, said="mine", kept=2)
    later = talk.say(parent=wrong, said="later", kept=4)

    async def act(run):
        await run.hear(talk)
        known = run.live._table.turns[number(later)]
        assert texts(history_of(known, 4, run.ledger.read)) == ["mine", "hi"]
        assert run.core.live.ends[TurnEnd.FAILED] == 2

    in_run(act)
