"""Judging of live turns: asks again and again until there is a verdict, or the turn has ended otherwise.

    verdicts.unjudged() ──► judge process ──score──► verdicts.take()
         ▲                     │
         └── after a wait ◄────┴── no score, or every attempt has failed
         └── at once ◄──────────── the judges are gone: they are started again, after a wait

Nothing of this waits for training, and training does not wait for it: a turn without a verdict waits in the
ledger. It expires there if its tokens become too old, and fails when it has waited for ``judge.give_up_s``.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from slipstream.configs.schema.judge import JudgeSection, ModelJudge
from slipstream.configs.schema.live import LiveJudgingConfig
from slipstream.rollout.ledger.storage.database import LedgerError
from slipstream.rollout.live.verdicts import Verdicts
from slipstream.rollout.reward.judge.judge_errors import JudgesClosed, JudgeStartFailed, JudgingFailed
from slipstream.rollout.reward.judge.judge_pool import JudgePool
from slipstream.rollout.tokens.record import CorruptRecord
from slipstream.rollout.tokens.trajectory import Messages

LONGEST_WAIT_S = 3600.0
"""Most seconds until a turn is asked about again, and until judges that have failed are started again."""

SHOWN_FAILURES = 5
"""Failures of judges that the user is told of. Further ones are only counted."""


class LiveJudging:
    """Gives every turn to the judges that waits for a verdict."""

    def __init__(
        self,
        judge: JudgeSection,
        settings: LiveJudgingConfig,
        verdicts: Verdicts,
        judges: Callable[[], AbstractAsyncContextManager[JudgePool]],
        note: Callable[[str], None],
    ) -> None:
        """``judges``: starts new judge processes. Entering raises JudgeStartFailed. ``note``: tells the user
        something that does not end the run. It returns at once and never raises.
        """
        self._judge = judge
        self._needs_ids = isinstance(judge, ModelJudge) and judge.scores_tokens
        self._settings = settings
        self._verdicts = verdicts
        self._judges = judges
        self._note = note
        self._timers: set[asyncio.TimerHandle] = set()
        self._shown = 0
        self._has_told_of_no_score = False

    async def run(self) -> None:
        """Judge until cancelled."""
        giving_up = asyncio.create_task(self._give_up(), name="giving up turns without a verdict")
        judging = asyncio.create_task(self._keep_judging(), name="judging with restarts")
        both = {giving_up, judging}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in both:
                if task.done():
                    task.result()  # a bug: raise it
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)
            for timer in self._timers:
                timer.cancel()

    async def _give_up(self) -> None:
        """Fail the turns that have waited too long, during an outage of the judges too."""
        while True:
            await asyncio.sleep(self._verdicts.give_up(self._judge.give_up_s))

    async def _keep_judging(self) -> None:
        outages = 0
        while True:
            verdicts = self._verdicts.count
            try:
                async with self._judges() as judges:
                    reason = await self._judge_with(judges)
            except JudgeStartFailed as error:
                reason = str(error)
            if self._verdicts.count > verdicts:
                outages = 0
            self._verdicts.outages += 1
            self._say(f"no turn of a live user can be judged at present: {reason}")
            await asyncio.sleep(self._wait_s(outages))
            outages += 1

    async def _judge_with(self, judges: JudgePool) -> str:
        """Judge turns until the judges are gone. Return why they are."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[str] = loop.create_future()
        settings = self._settings
        at_a_time = settings.processes * settings.concurrency
        workers = [
            loop.create_task(self._work(judges, gone), name=f"judging live turns {number}")
            for number in range(at_a_time)
        ]
        try:
            await asyncio.wait({gone, *workers}, return_when=asyncio.FIRST_COMPLETED)
            for worker in workers:
                if worker.done():
                    worker.result()  # a bug: raise it
            return gone.result()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    async def _work(self, judges: JudgePool, gone: "asyncio.Future[str]") -> None:
        while not gone.done():
            id_ = await self._verdicts.unjudged()
            try:
                question = await asyncio.to_thread(self._verdicts.question, id_, with_ids=self._needs_ids)
                if question is None:
                    continue
                verdict = await judges.judge(*question)
            except (LedgerError, CorruptRecord) as error:
                self._verdicts.unanswerable(id_, f"its messages cannot be read: {error}")
            except JudgingFailed as error:
                self._say(f"a turn of a live user waits on: {error}")
                self._later(id_)
            except (JudgeStartFailed, JudgesClosed) as error:
                self._verdicts.ask_again(id_)
                if not gone.done():
                    gone.set_result(str(error))
            except BaseException:
                self._verdicts.ask_again(id_)
                raise
            else:
                self._verdicts.votes += verdict.votes
                if verdict.nothing_to_learn:
                    self._verdicts.nothing_to_learn(id_)
                elif verdict.score is None and verdict.teacher is None:
                    self._has_no_score(question[1])
                    self._later(id_)
                else:
                    self._verdicts.take(id_, verdict)

    def _has_no_score(self, next_state: Messages) -> None:
        """Tell the user, once, that the judge has no score although something has come after a turn."""
        if next_state and not self._has_told_of_no_score:
            self._has_told_of_no_score = True
            self._note(
                "the judge has no score for what came after a turn of a live user; it is asked about such "
                f"turns again, first after {self._judge.ask_again_s:g} s (metric live/put_off)"
            )

    def _later(self, id_: int) -> None:
        """Ask about a turn again after a wait."""
        delay = self._wait_s(self._verdicts.put_off(id_))

        def ask() -> None:
            self._timers.discard(timer)
            self._verdicts.ask_again(id_)

        timer = asyncio.get_running_loop().call_later(delay, ask)
        self._timers.add(timer)

    def _wait_s(self, failures: int) -> float:
        return min(LONGEST_WAIT_S, self._judge.ask_again_s * 2 ** min(failures, 30))

    def _say(self, text: str) -> None:
        self._shown += 1
        if self._shown <= SHOWN_FAILURES:
            self._note(text)
