"""Random lives of a run with live users: any conversation, any restart, and each token trained once.

What must have happened is found from the entries and from the token ids alone: the sampled tokens of an entry
have an id that no other entry has. Lags are counted by walking the parents of versions.
"""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from slipstream.rollout.control.live_door import TurnEnd
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.ledger.rows.stored_turns import turn_id
from slipstream.rollout.reward.live import Verdict
from slipstream.rollout.tokens.turn_entries import Forgotten, SessionEnd, Turn, TurnType, UserReward
from tests.unit.test_live_turns import Run, Talk

BOUND = 2
EVENTS = 70
LIVES = 4


class Users:
    """Everything that users have said, and everything that was trained on it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.dice = random.Random(seed)
        self.talk = Talk()
        self.delivered = 0
        self.followed: set[int] = set()
        self.open: dict[str, list[int]] = {}
        """Turns that may be continued, by session."""
        self.forgotten: dict[int, int] = {}
        """Entry that asks for it, by turn."""
        self.parents: dict[int, int] = {}
        """Parent of each version that was published."""
        self.version = 0
        self.trained: dict[int, set[int]] = {}
        """Versions that each turn was trained into."""
        self.seen = Counter[str]()

    # ---- what users do

    def say(self) -> None:
        dice = self.dice
        session = f"session {dice.randrange(4)}"
        known = self.open.setdefault(session, [])
        parent = dice.choice(known[-4:]) if known and dice.random() < 0.8 else None
        shared = None
        if parent is not None and dice.random() < 0.3:
            shared = dice.randrange(len(self.talk.branches[parent]) + 1)
        line = self.line()
        old = line[-4:]
        spans = ((self.version, dice.randint(1, 3)),)
        if dice.random() < 0.3:
            spans = ((dice.choice(old), dice.randint(1, 2)), *spans)
        more = {}
        if dice.random() < 0.2:
            more = dice.choice([{"turn_type": TurnType.SIDE}, {"cancelled": True}])
        number = self.talk.turn(parent, shared, spans=spans, session=session, **more)
        known.append(number)
        if parent is not None and parent not in self.followed and dice.random() < 0.8:
            self.followed.add(parent)
            self.talk.next(parent)

    def reward(self) -> None:
        turns = [n for n, entry in enumerate(self.talk.entries, 1) if isinstance(entry, Turn)]
        if turns:
            self.talk.add(UserReward(self.dice.choice(turns[-10:]), self.dice.random()))

    def end_session(self) -> None:
        if self.open:
            session = self.dice.choice(list(self.open))
            self.open.pop(session)
            self.talk.add(SessionEnd(session, "key"))

    def forget(self) -> None:
        if self.open and self.dice.random() < 0.3:
            session = self.dice.choice(list(self.open))
            self.open.pop(session)
            meant = [
                number
                for number, entry in enumerate(self.talk.entries, 1)
                if isinstance(entry, Turn) and entry.session == session
            ]
            entry = self.talk.add(Forgotten(session, self.dice.choice([None, "key"])))
            self.forgotten.update(dict.fromkeys(meant, entry))

    # ---- versions

    def line(self) -> list[int]:
        line, version = [self.version], self.version
        while version:
            version = self.parents[version]
            line.append(version)
        return line[::-1]

    def lag(self, version: int) -> int:
        """Updates on the path between a version and the present one."""
        ancestors, behind = [version], self.line()
        while ancestors[-1] not in behind:
            ancestors.append(self.parents[ancestors[-1]])
        return len(ancestors) - 1 + len(behind) - 1 - behind.index(ancestors[-1])

    # ---- what the run does

    async def live(self, run: Run) -> None:
        """Let one process live for a while."""
        for _ in range(EVENTS):
            event = self.dice.choices(
                [self.say, self.reward, self.end_session, self.forget, self.hear, self.judge, self.step],
                [8, 1, 0.6, 0.6, 5, 4, 4],
            )[0]
            if event in (self.hear, self.judge, self.step):
                await event(run)
            else:
                event()

    async def hear(self, run: Run) -> None:
        first = max(1, self.delivered + 1 - self.dice.randrange(3))
        if len(self.talk.entries) >= first:
            await run.hear(self.talk, first)
            self.delivered = len(self.talk.entries)

    async def judge(self, run: Run) -> None:
        for _ in range(self.dice.randrange(6)):
            id_ = run.live.verdicts._next_unjudged()
            if id_ is None:
                break
            score = None if self.dice.random() < 0.2 else self.dice.random()
            run.live.verdicts.take(id_, Verdict(score))
            if score is None:
                run.live.verdicts.ask_again(id_)
        await run.ledger.flushed()
        await asyncio.sleep(0)

    async def step(self, run: Run) -> None:
        if not run.core.live.available:
            return
        waiting = asyncio.ensure_future(run.batch())
        await asyncio.wait([waiting], timeout=0.5)
        # A batch must not be cancelled while it is written.
        await run.ledger.flushed()
        await asyncio.wait([waiting], timeout=0.01)
        if waiting.cancel():
            return  # suspects of a failed step are withheld
        batch = await waiting
        turns: list[int] = []
        for trajectory in batch.trajectories:
            turns += self.check(trajectory)
        assert len(turns) == len(set(turns)), "a turn is in a batch twice"
        if self.dice.random() < 0.15:
            await run.batches.step_failed("killed")
            run.core.give_back()
            run.batches._batch.version = None
            run.batches._quarantine.given_up(run.batches._batch.ids[0])
            return
        if self.dice.random() < 0.3:
            self.forget()
            await self.hear(run)
        version = run.batches.next_version
        run.batches.published(version)
        await run.ledger.flushed()
        self.parents[version], self.version = self.version, version
        for turn in turns:
            self.trained.setdefault(turn, set()).add(version)
        self.seen["turns trained"] += len(turns)
        self.seen["trajectories"] += len(batch.trajectories)

    def check(self, trajectory) -> list[int]:
        """Check a trajectory. Return the entries whose tokens carry loss."""
        loss = trajectory.tokens_T[trajectory.loss_mask_T].tolist()
        turns = list(dict.fromkeys(token - 100 for token in loss))
        branch = self.talk.branches[turns[-1]]
        assert trajectory.tokens_T.tolist() == branch, "other tokens than the engine has seen"
        line = set(self.line())
        for turn in turns:
            entry = self.talk.entries[turn - 1]
            assert entry.turn_type is TurnType.MAIN and not entry.cancelled
            assert self.forgotten.get(turn, self.delivered + 1) > self.delivered, "it is forgotten"
            assert line.isdisjoint(self.trained.get(turn, ())), "trained twice"
            expected = [v for v, n in entry.spans for _ in range(n) if self.lag(v) <= BOUND]
            mask_T = trajectory.loss_mask_T & (trajectory.tokens_T == turn + 100)
            assert trajectory.versions_T[mask_T].tolist() == expected
        assert len(trajectory.turn_rewards) == len(turns)
        return turns


@pytest.mark.parametrize("seed", range(12))
def test_whatever_users_do_and_whenever_the_run_is_resumed(tmp_path, seed):
    users = Users(tmp_path, seed)
    for life in range(LIVES):
        run = Run(tmp_path, bound=BOUND, trajectories=users.dice.choice([1, 2, 4]), restored=users.version)
        # What was on its way is sent again.
        users.delivered = run.live.durable("gateway")

        async def body(run: Run = run) -> None:
            await users.live(run)
            if users.dice.random() < 0.5:
                await users.hear(run)
            await run.ledger.flushed()

        try:
            asyncio.run(body())
        finally:
            run.ledger.close()
        audit, _ = audit_ledger(tmp_path)
        assert audit.discrepancies == []
        line = set(users.line())
        trained = {turn for turn, versions in users.trained.items() if line & versions}
        assert audit.turns.get("trained", 0) == len(trained)
        for end in TurnEnd:
            assert run.core.live.ends[end] == audit.turns.get(end.value, 0)
        if life + 1 < LIVES:  # a checkpoint of any version behind the weights
            users.version = users.dice.choice(users.line()[-3:])
    assert users.seen["turns trained"] > 10
    assert turn_id(1, 1) < 0
