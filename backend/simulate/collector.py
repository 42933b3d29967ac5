"""The collector of a simulated run: the real one's groups and episodes, in the process of the driver.

assignments ──► GroupCollector ──► outbox ──► assignments      with headers, and without any chunk of tokens
"""

from collections.abc import Sequence

import msgspec

from slipstream.backend.simulate.simulated_episodes import NumberedGenerator
from slipstream.backend.simulate.simulated_ledger import CHUNK
from slipstream.backend.simulate.simulated_pool import SimulatedPool
from slipstream.rollout.collection.collector.evaluation import Evaluations
from slipstream.rollout.collection.collector.groups import GroupCollector
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.questions import EvaluationTasks
from slipstream.rollout.collection.messages import (
    NOTHING,
    PIECE,
    Assignment,
    PriorSample,
    Question,
    Status,
    Up,
)
from slipstream.rollout.engine.routing import PoolStatus
from slipstream.rollout.tokens.record import PieceHeader, decode_header, decode_piece, encode
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory

NAME = "simulated"
"""Name of the only collector."""


class SimulatedRecord(NumberedGenerator):
    """One episode's way to the engines. Of its tokens, the version spans are recorded."""

    def __init__(
        self,
        pool: SimulatedPool,
        outbox: Outbox,
        records: bool,
        group: int,
        assignment: int,
        sample: int,
        attempt: int,
    ) -> None:
        """``records``: there is a ledger, from which a restart of the trainer goes on."""
        super().__init__(pool, sample, attempt)
        self._outbox = outbox
        self._records = records
        self._key = (group, assignment, sample)
        self._is_known = False
        """The whole trajectory is in the ledger."""

    def resume(self, prior: PriorSample, chunks: memoryview) -> int:
        header = decode_piece(prior.pieces[-1][1])
        self.prior, self._is_known = header.spans, header.finish is not Finish.PARTIAL
        return len(prior.pieces)

    def write_ends(self, older_than_s: float = 0.0) -> None:
        """Record what the request under way has got so far, in place of what was recorded."""
        request = self.request
        if not self._records or request is None or request.future.done() or self._is_known:
            return
        spans = request.spans if request.engine is None else request.engine.spans_of(request)
        if spans:
            self._outbox.piece(*self._key, 0, PieceHeader(0, b"", spans), CHUNK)

    def accept(self, trajectory: Trajectory) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: no request of a simulated workflow outlasts it."""

    def answered(self, trajectory: Trajectory) -> None:
        if not self._is_known:
            self._outbox.answered(*self._key, 0, trajectory.header, b"")

    def judged(self, trajectory: Trajectory, scores: bytes = b"") -> None:
        self._outbox.judged(*self._key, trajectory.header, scores)


class Link:
    """Hands groups to the collector, and its events back: ``assignments.Outgoing`` and an outbox's sender."""

    def __init__(
        self, groups: GroupCollector[SimulatedRecord], assignments: Assignments, questions: EvaluationTasks
    ) -> None:
        self._groups = groups
        self._assignments = assignments
        self._questions = questions

    def assign(self, assignment: Assignment, chunks: Sequence[bytes]) -> None:
        assignment.prior = [_in_pieces(prior) for prior in assignment.prior]
        self._groups.start(assignment, memoryview(b"".join(chunks)))

    def cancel(self, group: int, assignment: int) -> None:
        self._groups.cancel(group, assignment)

    async def send(self, message: Up, chunks: Sequence[bytes]) -> None:
        self._assignments.received(NAME, message, memoryview(b"".join(chunks)))
        for result in message.evaluated:
            self._questions.answered(NAME, result)

    def status(self) -> Status:
        return Status(PoolStatus(), 0, 0.0)


def _in_pieces(prior: PriorSample) -> PriorSample:
    """Return a whole trajectory as a piece that lacks nothing: it has no tokens that could be decoded."""
    if prior.kind == PIECE:
        return prior
    header, spans, begin = decode_header(prior.header), list[tuple[int, int]](), 0
    for version, _, end in header.runs:
        if version != UNSAMPLED:
            spans.append((version, end - begin))
        begin = end
    piece = PieceHeader(0, b"", tuple(spans), header.finish, header.retractions)
    return PriorSample(prior.sample, PIECE, NOTHING, [(0, msgspec.Raw(encode(piece)))])


class Asked:
    """Hands evaluation episodes to the collector: ``questions.Asking``."""

    def __init__(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations

    def ask(self, question: Question) -> None:
        self._evaluations.start(question)

    def withdraw(self, task: int) -> None:
        self._evaluations.withdraw(task)

    def evaluates_from(self, step: int) -> None:
        """Do nothing: there is no episode log."""
