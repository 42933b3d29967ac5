"""Live users from entries to batches and back: exactly once, never too old, and never without a verdict."""

import asyncio
import sqlite3
import statistics
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from slipstream.backend.driver.loops.training import encoded
from slipstream.backend.objective.advantage import group_centred, group_normalized, leave_one_out
from slipstream.configs.schema.live import NoBaseline, RunningBaseline
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.live_door import TurnEnd, TurnState
from slipstream.rollout.control.versions import VersionTree
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.ledger.recovery import Recovered, open_ledger
from slipstream.rollout.ledger.rows.stored_turns import turn_id
from slipstream.rollout.ledger.storage.database import LEDGER
from slipstream.rollout.ledger.storage.segments import FOLDER
from slipstream.rollout.ledger.writing.writer import SAMPLES
from slipstream.rollout.live.baseline import Score, ScoreBaseline
from slipstream.rollout.live.live_turns import NOTICED, JournalGap, LiveTurns
from slipstream.rollout.prompts import PromptSet, PromptStream
from slipstream.rollout.reward.live import Verdict
from slipstream.rollout.tokens.record import REF, checksum, encode, encode_chunk, encode_trajectory
from slipstream.rollout.tokens.teacher import NOTHING_NEEDED, TeacherNeeds, TeacherScores
from slipstream.rollout.tokens.trajectory import Completion, Finish, Prompt, Span, TrajectoryBuilder
from slipstream.rollout.tokens.turn_entries import (
    Entry,
    Forgotten,
    NextState,
    SessionEnd,
    Turn,
    TurnType,
    UserReward,
)
from tests.unit.collecting import ready_group
from tests.unit.doubles import Listener

VOCAB = 1000
NOW = 1_000.0


def raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


class Talk:
    """A gateway: writes entries of its journal, and knows the tokens of each branch."""

    def __init__(self, name: str = "gateway") -> None:
        self.name = name
        self.entries: list[Entry] = []
        self.branches: dict[int, list[int]] = {}
        """Token ids up to the end of each turn."""
        self.sampled: dict[int, list[int]] = {}

    def add(self, entry: Entry) -> int:
        self.entries.append(entry)
        return len(self.entries)

    def turn(
        self,
        parent: int | None = None,
        shared: int | None = None,
        spans=((0, 2),),
        session: str = "session",
        key: str = "key",
        **more,
    ) -> int:
        """Say something; ``shared``: all of the parent's branch, unless it is given."""
        number = len(self.entries) + 1
        before = [] if parent is None else self.branches[parent]
        before = before[: len(before) if shared is None else shared]
        context = [10 * number % VOCAB, 10 * number % VOCAB + 1]
        sampled = [(100 + number) % VOCAB] * sum(n for _, n in spans)
        self.branches[number] = before + context + sampled
        self.sampled[number] = sampled
        logprobs = more.pop("logprobs", [-number / 10] * len(sampled))
        entry = Turn(
            session,
            key,
            parent,
            len(before),
            more.pop("turn_type", TurnType.MAIN),
            more.pop("reason", ""),
            spans,
            Finish.STOP,
            more.pop("cancelled", False),
            NOW - 20,
            NOW - 10,
            more.pop("kept", 0),
            raw(f'[{{"role": "user", "content": "{more.pop("said", "hello")}"}}]'),
            raw(f'{{"role": "assistant", "content": "{more.pop("answer", "hi")}"}}'),
            is_rewarded=more.pop("is_rewarded", False),
            chunk=encode_chunk(context, sampled, logprobs),
        )
        assert not more
        return self.add(entry)

    def next(self, turn: int, text: str = "thanks") -> int:
        return self.add(NextState(turn, raw(f'[{{"role": "user", "content": "{text}"}}]')))

    def say(self, *arguments, score: float | None = None, **more) -> int:
        """Say something that is followed by something."""
        number = self.turn(*arguments, **more)
        self.next(number)
        if score is not None:
            self.add(UserReward(number, score))
        return number


class Run:
    """A run of live users with a ledger, in a folder that outlives it."""

    def __init__(
        self,
        folder: Path,
        *,
        groups: int = 0,
        bound: int = 2,
        trajectories: int = 4,
        restored: int = 0,
        **more,
    ):
        self.ledger, self.recovered = open_ledger(
            folder, batch_size=groups, n_samples=1, bound=bound, restored=restored
        )
        self.core = core_of(self.recovered, bound, trajectories, groups)
        self.live = LiveTurns(
            self.core,
            self.ledger,
            partial(ScoreBaseline, more.pop("baseline", NoBaseline())),
            self.recovered.live,
            train=more.pop("train", True),
            needs=more.pop("needs", NOTHING_NEEDED),
            note=more.pop("note", lambda text: None),
            vocab=VOCAB,
            clock=more.pop("clock", lambda: NOW),
        )
        stream = PromptStream(PromptSet.of([Prompt(0, "")]), shuffle=False, seed=0)
        told = Listener()
        self.gate = AdmissionGate(self.core, Intake(stream), self.ledger, told, live=self.live)
        self.batches = Batches(
            self.gate,
            self.ledger,
            told.note,
            self.recovered.failures,
            live=self.live,
            live_wait_s=more.pop("wait_s", 0.0),
        )
        assert not more

    async def hear(self, talk: Talk, first: int = 1) -> None:
        self.live.take(talk.name, first, talk.entries[first - 1 :])
        await self.ledger.flushed()
        await asyncio.sleep(0)

    async def judge(self, score: float = 1.0) -> list[int]:
        """Give a verdict on every turn that waits for one. Return their numbers."""
        asked = []
        while (id_ := self.live.verdicts._next_unjudged()) is not None:
            asked.append(id_)
            self.live.verdicts.take(id_, Verdict(score))
        await self.ledger.flushed()
        await asyncio.sleep(0)
        return asked

    async def ready_group(self, reward: float = 1.0) -> None:
        """Admit a group, and make it ready with one trajectory of three tokens."""
        ticket = self.gate.admit()[0]
        builder = TrajectoryBuilder([1, 2])
        builder.add_completion(Completion((3, 4, 5), (-1.0,) * 3, (Span(ticket.version, 0, 3),), Finish.STOP))
        trajectory = builder.build().judged(reward)
        data = encode_trajectory(trajectory)
        ref = REF.pack(*self.ledger.append(data), len(data), checksum(data))
        self.ledger.judged(ticket.id * SAMPLES, ref, encode(trajectory.header))
        self.ledger.ready(ticket.id, 3)
        await self.ledger.flushed()
        self.gate.finished([ready_group(ticket.id, trajectory.header, refs=ref)])

    async def batch(self):
        """Take a batch, and return its trajectories as ranks decode them."""
        groups = await self.batches.next(5)
        await self.batches.step_begins()

        async def read(refs):
            return [self.ledger.read(each) for each in refs]

        return (await encoded(groups, self.batches, read)).decoded()

    async def step(self):
        batch = await self.batch()
        self.batches.published(self.batches.next_version)
        await self.ledger.flushed()
        return batch


def core_of(
    recovered: Recovered, bound: int, trajectories: int, groups: int = 0, served: int | None = None
) -> RolloutControl:
    return RolloutControl(
        groups,
        bound,
        versions=VersionTree(recovered.versions, recovered.copies),
        version=recovered.restored,
        served=served,
        live_trajectories=trajectories,
    )


@pytest.fixture
def in_run(tmp_path):
    """Returns a function that runs ``act(run)`` in one process's life of the run, and audits it."""

    def live(act, **settings):
        run = Run(tmp_path, **settings)

        async def body():
            await act(run)
            await run.ledger.flushed()

        try:
            asyncio.run(body())
        finally:
            run.ledger.close()
        assert audit_ledger(tmp_path)[0].discrepancies == []
        return run

    live.folder = tmp_path
    return live


def trained(batch) -> list[list[list[int]]]:
    """The ids that carry loss, by turn, of each trajectory."""
    found = []
    for trajectory in batch.trajectories:
        turn_T = trajectory.turn_T()
        mask_T = trajectory.loss_mask_T
        turns = [
            trajectory.tokens_T[mask_T & (turn_T == turn)].tolist() for turn in np.unique(turn_T[mask_T])
        ]
        found.append(turns)
    return found


def number(entry: int) -> int:
    return turn_id(1, entry)


# ---- entries


def test_an_entry_that_is_sent_again_counts_once(in_run):
    talk = Talk()
    talk.say()

    async def act(run):
        await run.hear(talk)
        assert run.live.durable("gateway") == 2
        talk.say(parent=1)
        await run.hear(talk, first=2)
        run.live.take("gateway", 1, talk.entries)
        assert run.core.live.states[TurnState.WAITING] == 2
        assert run.live.durable("gateway") == 4
        assert run.live.durable("another") == 0

    in_run(act)

    async def again(run):
        assert run.live.durable("gateway") == 4
        await run.hear(talk)
        assert run.core.live.states[TurnState.WAITING] == 2

    in_run(again)


def test_entries_that_were_left_out_are_refused(in_run):
    talk = Talk()
    talk.say()

    async def act(run):
        with pytest.raises(JournalGap, match=r"from number 2 on.*expected number 1"):
            run.live.take("gateway", 2, talk.entries[1:])

    in_run(act)


def test_an_entry_is_acknowledged_only_when_it_is_on_disk(in_run):
    talk = Talk()
    talk.say()

    async def act(run):
        run.live.take("gateway", 1, talk.entries)
        assert run.live.durable("gateway") == 0
        told = asyncio.Event()
        run.live.when_durable(told.set)
        await asyncio.wait_for(told.wait(), 60)
        assert run.live.durable("gateway") == 2

    in_run(act)


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({"turn_type": TurnType.SIDE, "reason": "temperature"}, TurnEnd.SIDE),
        ({"cancelled": True}, TurnEnd.CANCELLED),
        ({"spans": ()}, TurnEnd.FILTERED),
        ({"logprobs": [float("nan"), -1.0]}, TurnEnd.FAILED),
        ({"logprobs": [0.5, -1.0]}, TurnEnd.FAILED),
        ({"spans": ((7, 2),)}, TurnEnd.FAILED),
    ],
)
def test_what_cannot_be_trained_ends_at_once(in_run, more, end):
    talk = Talk()
    talk.say(**more)

    async def act(run):
        await run.hear(talk)
        assert run.core.live.ends == {end: 1}
        assert await run.judge() == []
        assert run.live.status().ends == {end: 1}

    in_run(act)

    async def again(run):
        assert run.live.status().ends[end] == 1

    in_run(again)


def test_ids_outside_the_vocabulary_and_turns_behind_them_are_not_trained(in_run):
    talk = Talk()
    bad = talk.turn()
    talk.entries[0] = msgspec.structs.replace(
        talk.entries[0], chunk=encode_chunk([VOCAB, 1], [1, 2], [-1, -1])
    )
    talk.say(parent=bad)

    async def act(run):
        await run.hear(talk)
        assert run.core.live.ends == {TurnEnd.FAILED: 2}

    in_run(act)

    async def again(run):
        talk.say(parent=bad)
        await run.hear(talk, first=4)
        assert run.core.live.ends[TurnEnd.FAILED] == 3

    in_run(again)


def test_nothing_is_judged_or_trained_if_the_recipe_says_so(in_run):
    talk = Talk()
    talk.say(score=1.0)

    async def act(run):
        await run.hear(talk)
        assert run.core.live.ends == {TurnEnd.FILTERED: 1}

    in_run(act, train=False)


def test_turns_behind_the_last_step_are_filtered_and_those_before_it_stay(in_run):
    """They would wait for ever: no version makes them too old."""

    async def act(run):
        talk = Talk()
        talk.say()
        await run.hear(talk)
        run.live.training_ends()
        talk.say(parent=1)
        await run.hear(talk, first=3)
        assert run.core.live.ends == {TurnEnd.FILTERED: 1}
        assert await run.judge() == [number(1)]
        assert run.live.status().ready == 1

    in_run(act)


# ---- judging


def test_a_turn_is_judged_when_something_has_followed_and_from_what_was_said(in_run):
    talk = Talk()
    talk.turn()

    async def act(run):
        await run.hear(talk)
        assert await run.judge() == []
        talk.next(1, "no, thanks")
        await run.hear(talk, first=2)
        id_ = await run.live.verdicts.unjudged()
        turn, next_state = run.live.verdicts.question(id_)
        assert (turn.session, turn.key, turn.text, turn.tokens) == ("session", "key", "hi", 2)
        assert turn.messages == [{"role": "user", "content": "hello"}]
        assert next_state == [{"role": "user", "content": "no, thanks"}]

    in_run(act)


def test_without_a_score_a_turn_waits_also_over_a_restart(in_run):
    talk = Talk()
    talk.say()

    async def act(run):
        await run.hear(talk)
        id_ = await run.live.verdicts.unjudged()
        run.live.verdicts.take(id_, Verdict(None))
        assert run.live.status().unjudged == 1

    in_run(act)

    async def again(run):
        assert run.live.verdicts.question(await run.live.verdicts.unjudged()) is not None
        assert run.live.status().unjudged == 1
        run.live.verdicts.ask_again(number(1))
        assert await run.judge(-1.0) == [number(1)]
        assert run.live.status().ready == 1
        assert run.core.live.states[TurnState.READY] == 1

    in_run(again)


def test_when_a_session_ends_its_turns_are_judged_without_a_next_state(in_run):
    talk = Talk()
    talk.turn()
    talk.turn(session="other")
    talk.add(SessionEnd("session", "key"))

    async def act(run):
        await run.hear(talk)
        [id_] = [await run.live.verdicts.unjudged()]
        assert id_ == number(1)
        assert run.live.verdicts.question(id_)[1] == []

    in_run(act)


def test_a_reward_of_the_client_takes_the_place_of_a_verdict(in_run):
    talk = Talk()
    first = talk.say()
    second = talk.say(session="other")

    async def act(run):
        await run.hear(talk)
        run.live.verdicts.take(number(second), Verdict(1.0))
        talk.add(UserReward(first, -2.0))
        talk.add(UserReward(second, -3.0))
        talk.add(UserReward(second, float("inf")))
        await run.hear(talk, first=5)
        run.live.verdicts.take(number(first), Verdict(1.0))
        batch = await run.step()
        assert sorted(t.reward for t in batch.trajectories) == [-3.0, -2.0]
        talk.add(UserReward(second, 5.0))
        await run.hear(talk, first=8)
        assert run.live.status().late_rewards == 1

    in_run(act)


def test_rewards_of_several_names_add_up_and_each_says_what_has_become_of_it(in_run):
    talk = Talk()
    first = talk.say()
    side = talk.say(session="other", turn_type=TurnType.SIDE)
    given = [
        UserReward(first, 0.5, "tests"),
        UserReward(first, 0.25, "style"),
        UserReward(first, 1.0, "tests"),
        UserReward(side, 1.0),
        UserReward(99, 1.0),
        UserReward(first, 3.4e38, "large"),
        UserReward(first, 3.4e38, "larger"),
        UserReward(first, 0.0, "large"),
    ]
    numbers = [talk.add(reward) for reward in given]

    async def act(run):
        await run.hear(talk)
        told = ["counted", "counted", "counted", "side", "ended", "counted", "too large", "counted"]
        assert run.live.outcomes("gateway") == list(zip(numbers, told, strict=True))
        assert not run.live.outcomes("gateway")
        [trajectory] = (await run.batch()).trajectories
        assert trajectory.reward == 1.25
        assert trajectory.reward_parts == (("large", 0.0), ("style", 0.25), ("tests", 1.0))
        late = talk.add(UserReward(first, 1.0))
        await run.hear(talk, first=late)
        assert run.live.outcomes("gateway") == [(late, "training")]
        run.batches.published(run.batches.next_version)
        await run.ledger.flushed()
        later = talk.add(UserReward(first, 1.0))
        talk.add(SessionEnd("session", "key"))
        await run.hear(talk, first=later)
        assert run.live.outcomes("gateway") == [(later, "trained")]
        assert number(first) not in run.live._table.turns
        last = talk.add(UserReward(first, 1.0))
        await run.hear(talk, first=last)
        assert run.live.outcomes("gateway") == [(last, "trained")]

    in_run(act)


def test_a_reward_after_a_restart_is_told_how_its_turn_has_ended(in_run):
    talk = Talk()
    first = talk.say(score=1.0)

    async def act(run):
        await run.hear(talk)
        await run.step()

    async def again(run):
        late = talk.add(UserReward(first, 1.0))
        await run.hear(talk, first=late)
        assert run.live.outcomes("gateway") == [(late, "trained")]

    in_run(act)
    in_run(again, restored=1)


def test_a_turn_whose_next_state_was_lost_is_not_judged_as_the_end_of_a_conversation(in_run):
    talk = Talk()
    lost = talk.turn()
    rewarded = talk.turn()
    last = talk.turn()
    talk.add(UserReward(rewarded, 1.0))
    talk.add(SessionEnd("session", "key", (lost, rewarded)))

    async def act(run):
        await run.hear(talk)
        assert run.core.live.ends == {TurnEnd.UNPAIRED: 1}
        assert await run.judge() == [number(last)]
        late = talk.add(UserReward(lost, 1.0))
        await run.hear(talk, first=late)
        assert run.live.outcomes("gateway")[-1] == (late, "unpaired")
        assert len((await run.step()).trajectories) == 2

    in_run(act)


@pytest.mark.parametrize(
    ("estimator", "reference"),
    [("grpo", group_normalized), ("dr_grpo", group_centred), ("rloo", leave_one_out)],
)
def test_scores_of_a_group_are_compared_as_those_of_a_group_of_prompts(estimator, reference):
    values = [0.5, 1.0, 0.0, 0.25]
    group = statistics.fmean(values), statistics.stdev(values), len(values)
    baseline = ScoreBaseline(RunningBaseline(), [(0, 7.0)], estimator=estimator)
    alone = Score(1, 8.0)
    *advantages, other = baseline.advantages([*(Score(1, value, group) for value in values), alone])
    expected = reference(torch.tensor(values), torch.zeros(4, dtype=torch.int64)).tolist()
    assert advantages == pytest.approx(expected, rel=1e-5)
    assert other == 1.0, "a turn without a group is compared with the running mean"


def test_a_client_that_rewards_its_turns_itself_is_asked_in_place_of_a_judge(in_run):
    talk = Talk()
    numbers = [talk.say(session=session, is_rewarded=True) for session in "ab"]
    talk.add(SessionEnd("a", "key"))
    group = (0.5, 0.25, 2)

    async def act(run):
        await run.hear(talk)
        assert await run.judge() == []
        first = [
            talk.add(UserReward(n, value, group=group)) for n, value in zip(numbers, (1.0, 0.0), strict=True)
        ]
        await run.hear(talk, first=first[0])
        batch = await run.batch()
        advantages = [a for each in batch.turn_advantages.values() for a in each]
        assert sorted(advantages) == pytest.approx([-2.0, 2.0], rel=1e-4)

    async def again(run):
        assert await run.judge() == []
        batch = await run.batch()
        advantages = [a for each in batch.turn_advantages.values() for a in each]
        assert sorted(advantages) == pytest.approx([-2.0, 2.0], rel=1e-4)

    in_run(act)
    in_run(again)


def scores(*logps: float, top: int | None = None) -> TeacherScores:
    logp_T = np.array(logps, np.float32)
    if top is None:
        return TeacherScores(logp_T)
    return TeacherScores(logp_T, np.full((len(logps), 1), top, np.int32), logp_T[:, None])


def test_a_turn_trains_on_its_score_its_teacher_or_both_also_over_a_restart(in_run):
    talk = Talk()
    for parent in (None, 1, 3):
        talk.say(parent=parent)
    verdicts = [
        Verdict(None, "shorter", scores(-1.0, -2.0)),
        Verdict(0.5),
        Verdict(-1.0, None, scores(-3.0, -4.0, top=7)),
    ]

    async def judge(run):
        await run.hear(talk)
        for verdict in verdicts:
            run.live.verdicts.take(await run.live.verdicts.unjudged(), verdict)
        await run.ledger.flushed()
        assert run.live.status().ready == 3

    async def train(run):
        assert run.live.status().ready == 3
        batch = await run.step()
        [trajectory] = batch.trajectories
        assert batch.turn_advantages == {0: (None, 0.75, -0.75)}  # the mean of the two scores is -0.25
        assert [reward for _, reward in trajectory.turn_rewards] == [None, 0.5, -1.0]
        assert trajectory.reward == -0.25
        teacher, turn_T = trajectory.teacher, trajectory.turn_T()
        mask_T = trajectory.loss_mask_T
        assert teacher.logp_T[mask_T & (turn_T == 0)].tolist() == [-1.0, -2.0]
        assert np.isnan(teacher.logp_T[mask_T & (turn_T == 1)]).all()
        assert teacher.logp_T[mask_T & (turn_T == 2)].tolist() == [-3.0, -4.0]
        assert np.isnan(teacher.logp_T[~mask_T]).all()
        assert teacher.has_top_T.tolist() == (mask_T & (turn_T == 2)).tolist()
        assert teacher.top_ids_TK[teacher.has_top_T].tolist() == [[7], [7]]
        assert run.live.status().baseline == pytest.approx(-0.25, abs=0.01)

    in_run(judge, baseline=RunningBaseline())
    in_run(train, baseline=RunningBaseline())


def test_a_batch_of_turns_with_a_teacher_alone_has_no_reward(in_run):
    talk = Talk()
    talk.say()

    async def act(run):
        await run.hear(talk)
        run.live.verdicts.take(await run.live.verdicts.unjudged(), Verdict(None, None, scores(-1.0, -2.0)))
        await run.ledger.flushed()
        batch = await run.step()
        assert (batch.trajectories[0].reward, batch.turn_advantages) == (None, {0: (None,)})
        assert run.live.status().since.scores == []

    in_run(act, baseline=RunningBaseline())


@pytest.mark.parametrize(
    ("teacher", "problem"),
    [
        (scores(-1.0), "1 tokens, expected one for each of the 2"),
        (scores(-1.0, float("nan")), "1 tokens, expected one for each of the 2"),
        (scores(-1.0, -1.0, top=VOCAB), "outside the vocabulary of 1000"),
    ],
)
def test_scores_of_a_teacher_that_do_not_fit_the_turn_are_a_failure_and_not_0(in_run, teacher, problem):
    talk = Talk()
    talk.say()

    async def act(run):
        await run.hear(talk)
        run.live.verdicts.take(await run.live.verdicts.unjudged(), Verdict(1.0, None, teacher))
        assert run.core.live.ends == {TurnEnd.FAILED: 1}

    in_run(act)
    with closing(sqlite3.connect(in_run.folder / LEDGER)) as ledger:
        [(note,)] = ledger.execute("SELECT note FROM turns").fetchall()
    assert problem in note


def test_a_verdict_that_a_recipe_cannot_train_on_filters_its_turn(in_run):
    talk = Talk()
    for session in ("score", "teacher"):
        talk.say(session=session)

    async def act(run):
        await run.hear(talk)
        talk.add(UserReward(1, 1.0))  # it trains nothing, so the judge is asked all the same
        await run.hear(talk, first=5)
        assert run.live.status().ready == 0
        run.live.verdicts.take(await run.live.verdicts.unjudged(), Verdict(1.0))
        run.live.verdicts.take(await run.live.verdicts.unjudged(), Verdict(1.0, None, scores(-1.0, -2.0)))
        await run.ledger.flushed()
        assert run.core.live.ends == {TurnEnd.FILTERED: 1}
        assert run.live.status().ready == 1

    in_run(act, needs=TeacherNeeds(logps=True, alone=True))


def test_scores_without_the_likeliest_tokens_that_a_recipe_needs_are_a_failure(in_run):
    talk = Talk()
    talk.say()
    talk.say(session="other")

    async def act(run):
        await run.hear(talk)
        run.live.verdicts.take(await run.live.verdicts.unjudged(), Verdict(1.0, None, scores(-1.0, -2.0)))
        run.live.verdicts.take(
            await run.live.verdicts.unjudged(), Verdict(1.0, None, scores(-1.0, -2.0, top=3))
        )
        await run.ledger.flushed()
        assert run.core.live.ends == {TurnEnd.FAILED: 1}
        assert run.live.status().ready == 1

    in_run(act, needs=TeacherNeeds(logps=True, tops=True))


def test_a_reward_of_the_client_leaves_the_scores_of_a_teacher(in_run):
    talk = Talk()
    talk.say()

    async def act(run):
        await run.hear(talk)
        run.live.verdicts.take(await run.live.verdicts.unjudged(), Verdict(None, None, scores(-1.0, -2.0)))
        talk.add(UserReward(1, 0.5))
        await run.hear(talk, first=3)

    async def again(run):
        batch = await run.step()
        assert batch.turn_advantages == {0: (0.5,)}
        assert batch.trajectories[0].teacher.has_T.sum() == 2

    in_run(act)
    in_run(again)


def test_a_turn_is_not_trained_before_its_score_is_on_disk(in_run):
    talk = Talk()
    talk.say()

    async def act(run):
        await run.hear(talk)
        run.live.verdicts.take(await run.live.verdicts.unjudged(), Verdict(1.0))
        assert run.core.live.states[TurnState.READY] == 0
        await run.ledger.flushed()
        assert run.core.live.states[TurnState.READY] == 1

    in_run(act)


# ---- trajectories


def test_turns_of_one_branch_train_as_one_trajectory_with_their_rewards(in_run):
    talk = Talk()
    first = talk.say(score=1.0)
    second = talk.say(first, score=-1.0)

    async def act(run):
        await run.hear(talk)
        batch = await run.step()
        [trajectory] = batch.trajectories
        assert trajectory.tokens_T.tolist() == talk.branches[second]
        assert trained(batch) == [[talk.sampled[first], talk.sampled[second]]]
        assert trajectory.turn_rewards == ((4, 1.0), (8, -1.0))
        assert trajectory.reward == 0.0
        assert batch.turn_advantages == {0: (1.0, -1.0)}
        np.testing.assert_allclose(
            trajectory.logprobs_T[trajectory.loss_mask_T], [-first / 10] * 2 + [-second / 10] * 2, rtol=1e-6
        )

    in_run(act)


@pytest.mark.parametrize("more", [{"turn_type": TurnType.SIDE}, {"cancelled": True}])
def test_side_turns_and_cancelled_ones_are_context(in_run, more):
    talk = Talk()
    first = talk.say(score=1.0)
    middle = talk.say(first, **more)
    last = talk.say(middle, score=0.0)

    async def act(run):
        await run.hear(talk)
        batch = await run.step()
        [trajectory] = batch.trajectories
        assert trajectory.tokens_T.tolist() == talk.branches[last]
        assert trained(batch) == [[talk.sampled[first], talk.sampled[last]]]

    in_run(act)


def sampled_otherwise(talk: Talk, turns: int, reason: str) -> None:
    for _ in range(turns):
        talk.turn(turn_type=TurnType.SIDE, reason=reason)


def test_the_operator_is_told_once_if_sampling_keeps_all_turns_from_being_trained(in_run):
    notes: list[str] = []
    talk = Talk()

    async def act(run):
        sampled_otherwise(talk, NOTICED - 1, "temperature")
        sampled_otherwise(talk, 20, "helper: title")
        await run.hear(talk)
        assert not notes
        sampled_otherwise(talk, 40, "temperature, top_p")
        await run.hear(talk)

    in_run(act, note=notes.append)
    [note] = notes
    assert "gateway.sampling: recipe" in note and "temperature" in note


def test_nobody_is_told_of_sampling_where_a_turn_can_be_trained(in_run):
    notes: list[str] = []
    talk = Talk()

    async def act(run):
        talk.turn()
        sampled_otherwise(talk, 3 * NOTICED, "temperature")
        await run.hear(talk)

    in_run(act, note=notes.append)
    assert not notes


def test_a_turn_that_was_trained_is_context_of_those_after_it(in_run):
    talk = Talk()
    first = talk.say(score=1.0)
    second = talk.turn(first)

    async def act(run):
        await run.hear(talk)
        assert trained(await run.step()) == [[talk.sampled[first]]]
        talk.add(UserReward(second, 1.0))
        third = talk.say(second, spans=((1, 2),), score=1.0)
        await run.hear(talk, first=5)
        batch = await run.step()
        assert batch.trajectories[0].tokens_T.tolist() == talk.branches[third]
        assert trained(batch) == [[talk.sampled[second], talk.sampled[third]]]

    in_run(act)


def test_a_branch_begins_where_history_was_rewritten(in_run):
    """Cut within the sampled tokens of a turn, within its context, and to a single token."""
    talk = Talk()
    first = talk.say(score=1.0)
    second = talk.say(first, score=2.0)
    branches = [talk.say(second, shared=shared, score=3.0) for shared in (7, 5, 3, 1, 0)]

    async def act(run):
        await run.hear(talk)
        batch = await run.step()
        found = {
            tuple(t.tokens_T.tolist()): turns
            for t, turns in zip(batch.trajectories, trained(batch), strict=True)
        }
        expected = {tuple(talk.branches[each]): [talk.sampled[each]] for each in branches}
        expected[tuple(talk.branches[second])] = [talk.sampled[first], talk.sampled[second]]
        assert found == expected

    in_run(act, trajectories=8)


def test_a_fork_trains_the_common_turns_once(in_run):
    talk = Talk()
    first = talk.say(score=1.0)
    left, right = talk.say(first, score=1.0), talk.say(first, score=1.0)
    last = talk.say(left, score=1.0)

    async def act(run):
        await run.hear(talk)
        batch = await run.step()
        assert sorted(trained(batch)) == sorted(
            [[talk.sampled[each] for each in (first, left, last)], [talk.sampled[right]]]
        )

    in_run(act)


def test_tokens_beyond_the_bound_carry_no_loss_and_a_turn_without_others_expires(in_run):
    talk = Talk()
    old = talk.turn(session="sleeps")
    busy = [talk.say(session="busy", score=0.5)]

    async def act(run):
        await run.hear(talk)
        for version in range(1, 4):
            await run.step()
            heard = len(talk.entries)
            spans = ((0, 1), (version, 2)) if version == 3 else ((version, 2),)
            busy.append(talk.say(busy[-1], spans=spans, session="busy", score=0.5))
            await run.hear(talk, first=heard + 1)
        since = run.live.status().since
        assert (list(since.expired_lags), list(since.expired_ages_s)) == ([3], [10.0])
        assert run.core.live.ends[TurnEnd.EXPIRED] == 1
        batch = await run.step()
        assert trained(batch) == [[talk.sampled[busy[-1]][1:]]], "one of its three tokens is too old"
        assert old

    in_run(act, bound=2)


def test_turns_of_a_session_that_is_over_may_expire_together(in_run):
    talk = Talk()
    first = talk.say(session="over")
    talk.say(first, session="over")
    talk.add(SessionEnd("over", "key"))
    talk.say(session="busy", score=1.0)

    async def act(run):
        await run.hear(talk)
        await run.step()
        assert run.core.live.ends[TurnEnd.EXPIRED] == 2
        assert run.live.status().unjudged == 0

    in_run(act, bound=0)


# ---- batches


def test_a_batch_waits_for_turns_no_longer_than_it_shall(in_run):
    talk = Talk()
    talk.say(score=1.0)

    async def act(run):
        waiting = asyncio.create_task(run.batches.next(1e-3))
        await asyncio.sleep(0.02)
        assert not waiting.done(), "there is nothing to train: nobody is to blame"
        await run.hear(talk)
        assert await asyncio.wait_for(waiting, 60) == []
        assert len(run.batches.live) == 1
        await run.batches.step_begins()
        run.batches.published(run.batches.next_version)

    in_run(act, wait_s=0.05)


def test_a_full_batch_waits_for_nothing(in_run):
    talk = Talk()
    for session in "abcde":
        talk.say(session=session, score=1.0)

    async def act(run):
        await run.hear(talk)
        batch = await asyncio.wait_for(run.step(), 60)
        assert len(batch.trajectories) == 4
        assert len(set(batch.group_N.tolist())) == 4

    in_run(act, wait_s=3600.0)


def test_a_batch_holds_its_groups_and_as_many_turns_as_there_are(in_run):
    talk = Talk()
    first = talk.say(score=0.25)

    async def act(run):
        await run.ready_group(0.5)
        await run.hear(talk)
        batch = await asyncio.wait_for(run.step(), 60)
        assert trained(batch) == [[[3, 4, 5]], [talk.sampled[first]]]
        assert batch.group_N.tolist() == [0, number(first)]
        assert batch.turn_advantages == {1: (0.25,)}
        assert [trajectory.reward for trajectory in batch.trajectories] == [0.5, 0.25]
        await run.ready_group()
        batch = await asyncio.wait_for(run.step(), 60)
        assert trained(batch) == [[[3, 4, 5]]], "no turn is ready, and none is waited for any longer"
        assert batch.turn_advantages == {}
        for session in "abc":
            talk.say(session=session, spans=((2, 2),), score=1.0)
        await run.hear(talk, first=4)
        waiting = asyncio.create_task(run.batches.next(60))
        await asyncio.sleep(0.1)
        assert not waiting.done(), "turns never take the place of groups"
        await run.ready_group()
        await asyncio.wait_for(waiting, 60)
        assert len(run.batches.live) == 2
        await run.batches.step_begins()
        run.batches.published(run.batches.next_version)

    in_run(act, groups=1, trajectories=2, wait_s=0.01)


def test_a_batch_of_groups_is_not_given_up_because_of_turns(in_run):
    """The time for a batch runs out before the time for turns."""

    async def act(run):
        await run.ready_group()
        assert len(await run.batches.next(0.05)) == 1
        await run.batches.step_begins()
        run.batches.published(run.batches.next_version)

    in_run(act, groups=1, wait_s=3600.0)


def test_a_turn_whose_step_is_lost_is_trained_again_and_the_baseline_forgets_it(in_run):
    talk = Talk()
    talk.say(score=1.0)
    talk.say(1, score=3.0, session="session")
    baseline = RunningBaseline(decay=0.5)

    async def act(run):
        await run.hear(talk)
        await run.step()
        heard = len(talk.entries)
        talk.say(session="other", spans=((1, 2),), score=2.0)
        await run.hear(talk, first=heard + 1)
        batch = await run.step()
        expected = 2.0 - (1.0 * 0.5 + 3.0) / 1.5
        assert batch.turn_advantages == {0: (pytest.approx(expected),)}

    in_run(act, baseline=baseline)

    async def again(run):
        assert run.live._baseline.mean == pytest.approx((1.0 * 0.5 + 3.0) / 1.5)
        batch = await run.step()
        assert trained(batch) == [[talk.sampled[7]]]

    in_run(again, restored=1, baseline=baseline)


def test_a_turn_that_kills_the_trainer_is_quarantined(in_run):
    talk = Talk()
    bad = talk.say(session="bad", score=1.0)
    good = talk.say(session="good", score=1.0)

    async def act(run):
        await run.hear(talk)
        for _ in range(20):
            batch = await run.batch()
            poisoned = talk.sampled[bad] in [turn for turns in trained(batch) for turn in turns]
            if not poisoned:
                run.batches.published(run.batches.next_version)
                break
            await run.batches.step_failed("killed")
            run.core.give_back()
        for _ in range(20):
            if run.core.live.ends[TurnEnd.FAILED]:
                break
            heard = len(talk.entries)
            talk.say(session=f"further {heard}", spans=((run.gate.core.version, 2),), score=1.0)
            await run.hear(talk, first=heard + 1)
            batch = await run.batch()
            poisoned = talk.sampled[bad] in [turn for turns in trained(batch) for turn in turns]
            if poisoned:
                await run.batches.step_failed("killed")
                run.core.give_back()
            else:
                run.batches.published(run.batches.next_version)
        assert run.core.live.ends[TurnEnd.FAILED] == 1
        assert not run.core.live.is_alive(number(bad))
        assert run.core.live.ends[TurnEnd.TRAINED] >= 1
        assert good

    in_run(act, bound=16)


# ---- forgetting


def test_what_is_forgotten_is_never_trained_and_erased_behind_the_step_that_reads_it(in_run):
    talk = Talk()
    read = talk.say(session="a", score=1.0)
    talk.say(session="b", score=1.0)
    talk.say(session="c", key="another", score=1.0)

    def stored() -> bytes:
        return b"".join(path.read_bytes() for path in (in_run.folder / FOLDER).iterdir())

    async def act(run):
        await run.hear(talk)
        batch = await run.batch()
        assert len(batch.trajectories) == 1
        heard = len(talk.entries)
        talk.add(Forgotten(None, "key"))
        await run.hear(talk, first=heard + 1)
        assert stored().count(b"hello") == 3, "a step may read it"
        run.batches.published(run.batches.next_version)
        await run.ledger.flushed()
        run.ledger.when_durable(lambda: None)
        await run.ledger.flushed()
        assert stored().count(b"hello") == 1
        assert run.core.live.ends == {TurnEnd.TRAINED: 1, TurnEnd.FORGOTTEN: 1}
        assert trained(await run.step()) == [[talk.sampled[7]]]
        assert read

    in_run(act, trajectories=1)

    async def again(run):
        assert run.core.live.ends[TurnEnd.FORGOTTEN] == 2, "its training is lost, and it is not trained again"
        assert run.core.live.states[TurnState.READY] == 1

    in_run(again, restored=0)


def test_a_turn_that_continues_what_is_forgotten_is_not_trained(in_run):
    talk = Talk()
    first = talk.say(score=1.0)
    talk.add(Forgotten("session", None))
    talk.say(first, score=1.0)
    talk.say(score=1.0)

    async def act(run):
        await run.hear(talk)
        assert run.core.live.ends == {TurnEnd.FORGOTTEN: 1, TurnEnd.FAILED: 1}
        assert trained(await run.step()) == [[talk.sampled[8]]]

    in_run(act)


def sessions_in(folder: Path) -> int:
    """Return the number of sessions of which the ledger keeps something."""
    with closing(sqlite3.connect(folder / LEDGER)) as connection:
        [(count,)] = connection.execute("SELECT count(*) FROM sessions")
    return count


def test_nothing_is_kept_of_a_session_that_is_forgotten(in_run):
    talk = Talk()
    talk.say(session="a", turn_type=TurnType.SIDE)
    talk.turn(1, session="a")
    talk.add(Forgotten("a", None))

    async def act(run):
        await run.hear(talk)
        assert run.live._table.sessions == {}
        assert run.live._table.turns == {}
        await run.ledger.flushed()

    in_run(act)
    assert sessions_in(in_run.folder) == 0


def test_a_session_that_is_forgotten_in_training_is_kept_until_its_step_is_over(in_run):
    talk = Talk()
    talk.say(session="a", score=1.0)

    async def act(run):
        await run.hear(talk)
        await run.batches.next(60)
        talk.add(Forgotten(None, "key"))
        await run.hear(talk, first=4)
        await run.batches.step_begins()
        assert [run.ledger.read(each.refs) for each in run.batches.live]
        [count] = run.ledger._store._connection.execute("SELECT count(*) FROM sessions").fetchone()
        assert count == 1
        run.batches.published(run.batches.next_version)
        assert run.live._table.turns == {}
        run.ledger.release(run.gate.core.version)
        await run.ledger.flushed()

    in_run(act)
    assert sessions_in(in_run.folder) == 0


def test_a_session_that_was_forgotten_in_a_step_that_is_lost_is_over_after_a_restart(in_run):
    talk = Talk()
    talk.say(session="a", score=1.0)

    async def act(run):
        await run.hear(talk)
        await run.batches.next(60)
        await run.batches.step_begins()
        talk.add(Forgotten("a", "key"))
        await run.hear(talk, first=4)

    in_run(act)
    assert sessions_in(in_run.folder) == 1

    async def again(run):
        assert run.live._table.turns == {}

    in_run(again)
    assert sessions_in(in_run.folder) == 0


# ---- a trainer that is restored in a running process


def test_while_the_ledger_goes_back_entries_and_verdicts_wait(in_run):
    talk = Talk()
    talk.say(score=1.0)
    asked = talk.say(session="asked")

    async def act(run):
        await run.hear(talk)
        await run.step()
        id_ = await run.live.verdicts.unjudged()
        assert id_ == number(asked)
        run.live.hold()
        heard = len(talk.entries)
        talk.say(session="new", spans=((1, 2),))
        run.live.take("gateway", heard + 1, talk.entries[heard:])
        told = asyncio.Event()
        run.live.when_durable(told.set)
        run.live.verdicts.take(id_, Verdict(0.5))
        recovered = await run.ledger.restarted(0, bound=2, n_samples=1)
        assert not told.is_set()
        assert run.live.durable("gateway") == heard
        core = core_of(recovered, 2, 4)
        run.live.restored(core, recovered.live)
        run.core = core
        await asyncio.wait_for(told.wait(), 60)
        assert run.live.durable("gateway") == len(talk.entries)
        await run.ledger.flushed()
        assert core.live.states == {TurnState.WAITING: 1, TurnState.READY: 2, TurnState.TRAINING: 0}

    in_run(act)


def test_users_are_learned_from_again_when_the_engines_serve_the_restored_weights(in_run):
    """Without groups: the trainer is restored three updates back, beyond the bound of 2."""
    talk = Talk()

    async def act(run):
        for version in range(3):
            talk.say(spans=((version, 2),), session=f"before {version}", score=1.0)
            await run.hear(talk, first=3 * version + 1)
            await run.step()
        run.live.hold()
        recovered = await run.ledger.restarted(0, bound=2, n_samples=1)
        core = core_of(recovered, 2, 4, served=3)
        prompts = PromptStream(PromptSet.of([Prompt(0, "")]), shuffle=False, seed=0)
        run.gate.restored(core, Intake(prompts), [])
        run.batches.restored([])
        run.live.restored(core, recovered.live)
        heard = len(talk.entries)
        old = talk.say(spans=((3, 2),), session="old", score=1.0)
        await run.hear(talk, first=heard + 1)
        assert core.live.ends[TurnEnd.EXPIRED] == 1 and not core.live.is_alive(number(old))
        assert not run.gate.core.may_generate
        copy = await run.batches.copy_begins()
        run.batches.published(copy)
        assert (run.gate.core.version, run.gate.core.step) == (4, 0)
        heard = len(talk.entries)
        new = talk.say(spans=((4, 2),), session="new", score=1.0)
        await run.hear(talk, first=heard + 1)
        batch = await asyncio.wait_for(run.step(), 60)
        assert talk.sampled[new] in [turn for turns in trained(batch) for turn in turns]
        assert (run.gate.core.version, run.gate.core.step) == (5, 1)

    in_run(act)


# ---- the baseline


def test_the_baseline_is_the_weighted_mean_of_what_was_trained():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=50)
    baseline = ScoreBaseline(RunningBaseline(decay=0.9))
    baseline.trained(Score(0, score) for score in scores)
    weights = 0.9 ** np.arange(50)[::-1]
    expected = (weights * scores).sum() / weights.sum()
    assert baseline.advantages([Score(0, 1.0), Score(1, 2.0)]) == pytest.approx([1 - expected, 2 - expected])


def test_each_key_has_a_baseline_that_begins_at_the_mean_of_all():
    baseline = ScoreBaseline(RunningBaseline(decay=0.5, per="key"), [(1, 4.0)])
    assert baseline.advantages([Score(2, 0.0), Score(1, 0.0)]) == [-4.0, -4.0]
    baseline.trained([Score(2, 0.0)])
    assert baseline.advantages([Score(2, 0.0)]) == [pytest.approx(-4.0 * 0.5 / 1.5)]


def test_before_anything_was_trained_the_batch_stands_for_what_is_unknown():
    assert ScoreBaseline(RunningBaseline()).advantages([Score(0, 1.0), Score(1, 0.0)]) == [0.5, -0.5]
    assert ScoreBaseline(NoBaseline()).advantages([Score(0, 1.0)]) == [1.0]
