"""The collector of a simulated run: the real one's groups and episodes, in the process of the driver.

assignments ──► GroupCollector ──► outbox ──► assignments      with headers, and without any chunk of tokens
"""

from collections.abc import Sequence

from slipstream.backend.simulate.simulated_episodes import NumberedGenerator
from slipstream.backend.simulate.simulated_pool import SimulatedPool
from slipstream.rollout.collection.collector.evaluation import Evaluations
from slipstream.rollout.collection.collector.groups import GroupCollector
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.questions import EvaluationTasks
from slipstream.rollout.collection.messages import Assignment, PriorSample, Question, Status, Up
from slipstream.rollout.engine.routing import PoolStatus
from slipstream.rollout.tokens.trajectory import Trajectory

NAME = "simulated"
"""Name of the only collector."""


class SimulatedRecord(NumberedGenerator):
    """One episode's way to the engines. There is no token to record."""

    def __init__(
        self, pool: SimulatedPool, outbox: Outbox, group: int, assignment: int, sample: int, attempt: int
    ) -> None:
        super().__init__(pool, sample, attempt)
        self._outbox = outbox
        self._key = (group, assignment, sample)

    def resume(self, prior: PriorSample, chunks: memoryview) -> int:
        """Raise: a simulated run has no other collectors."""
        raise AssertionError("nothing of a simulated episode is ever recorded")

    def write_ends(self, older_than_s: float = 0.0) -> None:
        """Do nothing."""

    def accept(self, trajectory: Trajectory) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: no request of a simulated workflow outlasts it."""

    def answered(self, trajectory: Trajectory) -> None:
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
        self._groups.start(assignment, memoryview(b""))

    def cancel(self, group: int, assignment: int) -> None:
        self._groups.cancel(group, assignment)

    async def send(self, message: Up, chunks: Sequence[bytes]) -> None:
        self._assignments.received(NAME, message, memoryview(b""))
        for result in message.evaluated:
            self._questions.answered(NAME, result)

    def status(self) -> Status:
        return Status(PoolStatus(), 0, 0.0)


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
