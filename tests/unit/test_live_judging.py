"""Judging of live turns: an outage, a failure and no score leave a turn waiting, and harm no other turn."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

from slipstream.configs.schema import CodeJudge, LiveJudgingConfig, PluginConfig
from slipstream.rollout.control.live_door import TurnEnd, TurnState
from slipstream.rollout.live.judging import LiveJudging
from slipstream.rollout.reward.judge.judge_errors import JudgesClosed, JudgeStartFailed, JudgingFailed
from slipstream.rollout.reward.judge.judge_pool import JudgePool
from slipstream.rollout.reward.live import Verdict, VoteCounts, text_of
from tests.unit.doubles import Listener
from tests.unit.test_live_turns import Run, Talk, number

ASK_AGAIN_S = 0.02


class Judges:
    """Scripted judges: what comes next names the answer. ``down``: they cannot be started."""

    def __init__(self) -> None:
        self.answers: dict[str, list[object]] = {}
        self.asked: list[str] = []
        self.starts = 0
        self.down = False
        self.together = asyncio.Barrier(1)
        """So many questions are answered at a time."""
        self.at_once = self.most_at_once = 0

    @asynccontextmanager
    async def open(self):
        self.starts += 1
        if self.down:
            raise JudgeStartFailed("the server is down")
        yield self

    async def judge(self, turn, next_state) -> Verdict:
        said = text_of(next_state[0])
        self.asked.append(said)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.together.wait()
            answers = self.answers.get(said, [])
            answer = answers.pop(0) if answers else Verdict(1.0)
            if isinstance(answer, BaseException):
                raise answer
            assert isinstance(answer, Verdict)
            return answer
        finally:
            self.at_once -= 1


def judged(folder: Path, judges: Judges, *said: str, until: int | None = None, **settings) -> Run:
    """Have turns judged, each followed by a text, until so many are ready; all, if not given."""
    run, talk = Run(folder, trajectories=64), Talk()
    for each in said:
        talk.next(talk.turn(session=each), each)
    judge = CodeJudge(ask_again_s=settings.pop("ask_again_s", ASK_AGAIN_S))
    limits = LiveJudgingConfig(**{"concurrency": 2} | settings)
    listener = Listener()
    run.notes = listener.notes

    async def body():
        await run.hear(talk)
        judging = asyncio.create_task(
            LiveJudging(judge, limits, run.live.verdicts, judges.open, listener.note).run()
        )
        async with asyncio.timeout(60):
            while run.core.live.states[TurnState.READY] < (len(said) if until is None else until):
                await asyncio.sleep(0.005)
                if judging.done():
                    judging.result()
        judging.cancel()
        await asyncio.wait({judging})
        await run.ledger.flushed()

    try:
        asyncio.run(body())
    finally:
        run.ledger.close()
    return run


def test_every_turn_is_judged_and_no_more_at_a_time_than_allowed(tmp_path):
    judges = Judges()
    judges.together = asyncio.Barrier(4)
    run = judged(tmp_path, judges, *"abcdefgh", processes=2, concurrency=2)
    assert sorted(judges.asked) == list("abcdefgh")
    assert judges.most_at_once == 4
    assert run.live.status().verdicts == 8
    assert judges.starts == 1


def test_a_turn_without_a_score_is_asked_about_again(tmp_path):
    judges = Judges()
    judges.answers["later"] = [Verdict(None, "a hint alone is no verdict"), Verdict(None), Verdict(-1.0)]
    run = judged(tmp_path, judges, "later", "now")
    assert judges.asked.count("later") == 3
    assert run.live.status().put_off == 2
    [score] = [turn.score for turn in run.live._table.turns.values() if turn.id == number(1)]
    assert score == -1.0


def test_the_user_is_told_once_of_turns_without_a_score(tmp_path):
    judges = Judges()
    judges.answers |= {"a": [Verdict(None)], "b": [Verdict(None)]}
    run = judged(tmp_path, judges, "a", "b", ask_again_s=0.03)
    assert run.notes == [
        "the judge has no score for what came after a turn of a live user; it is asked about such turns "
        "again, first after 0.03 s (metric live/put_off)"
    ]


def test_a_failure_leaves_a_turn_waiting_and_tells_the_user(tmp_path):
    judges = Judges()
    judges.answers["broken"] = [JudgingFailed("the judge has raised"), Verdict(0.5)]
    run = judged(tmp_path, judges, "broken")
    assert judges.asked == ["broken", "broken"]
    assert run.notes == ["a turn of a live user waits on: the judge has raised"]


def test_judges_that_end_are_started_again_and_their_questions_asked_again(tmp_path):
    judges = Judges()
    judges.answers["a"] = [JudgeStartFailed("a seat has given up"), Verdict(1.0)]
    judges.answers["b"] = [JudgesClosed("closed"), Verdict(1.0)]
    run = judged(tmp_path, judges, "a", "b", "c")
    assert judges.starts >= 2
    assert run.live.status().judge_outages >= 1
    assert any("a seat has given up" in note or "closed" in note for note in run.notes)


def test_a_turn_that_cannot_be_read_fails_and_no_other(tmp_path):
    judges = Judges()
    run, talk = Run(tmp_path, trajectories=64), Talk()
    talk.next(talk.turn(session="a"), "a")
    talk.next(talk.turn(session="b"), "b")
    read, damaged = run.ledger.read, []

    def broken(refs: bytes) -> bytes:
        data = read(refs)
        if not damaged and b'"content"' in data:
            damaged.append(data)
            return b"no record"
        return data

    run.ledger.read = broken

    async def body():
        await run.hear(talk)
        judging = LiveJudging(
            CodeJudge(), LiveJudgingConfig(), run.live.verdicts, judges.open, Listener().note
        )
        task = asyncio.create_task(judging.run())
        async with asyncio.timeout(60):
            while run.core.live.states[TurnState.READY] < 1 or run.core.live.states[TurnState.WAITING]:
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait({task})

    try:
        asyncio.run(body())
    finally:
        run.ledger.close()
    assert len(judges.asked) == 1
    assert sum(run.core.live.ends.values()) == 1


def test_an_outage_of_real_judge_processes_is_no_score(tmp_path):
    """The judge cannot be constructed, then raises, then is there again."""
    file = tmp_path / "up"
    plugin = PluginConfig(path="tests.unit.live_judges.DownUntil", args={"path": str(file), "at_start": True})
    settings = LiveJudgingConfig(
        attempts=1, retry_after_s=0.01, processes=1, concurrency=2, start_timeout_s=120
    )
    folder = tmp_path / "run"
    folder.mkdir()
    run, talk = Run(folder, trajectories=64), Talk()
    talk.next(talk.turn(), "thanks")
    told = Listener()

    def pool() -> JudgePool:
        return JudgePool(settings, plugin, tmp_path, "live", of_turns=True)

    async def body():
        await run.hear(talk)
        judging = LiveJudging(CodeJudge(ask_again_s=0.05), settings, run.live.verdicts, pool, told.note)
        task = asyncio.create_task(judging.run())
        async with asyncio.timeout(240):
            while not told.notes:
                await asyncio.sleep(0.01)
            assert run.core.live.states[TurnState.WAITING] == 1
            file.touch()
            while run.core.live.states[TurnState.READY] < 1:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})

    try:
        asyncio.run(body())
    finally:
        run.ledger.close()
    assert "down" in told.notes[0]
    assert run.live.status().verdicts == 1


def test_a_turn_that_waits_too_long_fails_also_while_the_judges_are_down(tmp_path):
    judges = Judges()
    judges.down = True
    now = [1_000.0]
    run, talk = Run(tmp_path, trajectories=64, clock=lambda: now[0]), Talk()
    talk.next(talk.turn(session="a"), "a")

    async def body():
        await run.hear(talk)
        judge = CodeJudge(ask_again_s=ASK_AGAIN_S, give_up_s=60)
        assert run.live.verdicts.give_up(judge.give_up_s) == 60
        now[0] += 59
        assert run.live.verdicts.give_up(judge.give_up_s) == 1
        assert run.core.live.states[TurnState.WAITING] == 1
        now[0] += 1
        task = asyncio.create_task(
            LiveJudging(judge, LiveJudgingConfig(), run.live.verdicts, judges.open, Listener().note).run()
        )
        async with asyncio.timeout(60):
            while run.core.live.states[TurnState.WAITING]:
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait({task})
        run.live.verdicts.take(number(1), Verdict(1.0))  # it comes too late
        await run.ledger.flushed()

    try:
        asyncio.run(body())
    finally:
        run.ledger.close()
    assert run.core.live.ends[TurnEnd.FAILED] == 1
    assert run.core.live.states[TurnState.READY] == 0
    assert run.live.status().given_up == 1


def test_a_turn_about_which_there_is_nothing_to_learn_ends(tmp_path):
    judges = Judges()
    judges.answers["no lesson"] = [Verdict(None, nothing_to_learn=True, votes=VoteCounts(0, 1, 2))]
    run = judged(tmp_path, judges, "no lesson", "a", until=1)
    assert run.core.live.ends[TurnEnd.FILTERED] == 1
    assert judges.asked.count("no lesson") == 1
    assert run.live.status().votes == VoteCounts(tied=0, unparsable=1, missing=2)
