"""A run whose training loop is the user's: batches, steps, publications and evaluations by hand.

with OwnRun(recipe) ──► thread: attended ──► run ──► engines, collectors, trainer
     batch, step, publish, evaluate ────────► OwnLoop ──┘
     end of the block ──► checkpoint, export, everything ended
"""

import asyncio
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.backend.commands.preflight import check_start
from slipstream.backend.commands.run import attended
from slipstream.backend.monitor.summary import RunSummary
from slipstream.configs.load import check_recipe
from slipstream.configs.schema import RunConfig

if TYPE_CHECKING:
    from slipstream.backend.driver.loops.own_loop import Answer, OwnEvaluation, TrainBatch, Verb
    from slipstream.backend.driver.loops.training import StepEvent
    from slipstream.rollout.collection.driver.batches import Batches

T = TypeVar("T")

Next = Literal["batch", "step", "publish"]


class OwnRun:
    """A run inside of a ``with`` block, in which you take the training steps:

        with slipstream.OwnRun(recipe) as run:
            while run.steps_done < run.total_steps:
                batch = run.batch()             # ready groups, as long as it takes to collect them
                stats = run.step(batch)         # the batch, or a changed one
                version = run.publish()         # into the running engines
                if version % 10 == 0:
                    print(version, stats["train/loss"], run.evaluate())
        print(run.summary)

    Engines and collectors go on beside your code, so that time between two calls costs staleness, which
    ``rollout.max_head_offpolicyness`` bounds, and nothing else. At the end of the block the policy is written
    to ``checkpoint-hf`` of the run folder; whatever ends the block, everything that was started ends with it.
    The section ``eval`` is evaluated when you ask for it.
    """

    def __init__(
        self,
        recipe: RunConfig,
        *,
        resume: bool = False,
        accept_changed_inputs: bool = False,
        overwrite: bool = False,
    ) -> None:
        """The options are those of ``train``. Nothing is started before the block begins."""
        self._recipe = recipe
        self._options = {
            "resume": resume,
            "accept_changes": accept_changed_inputs,
            "overwrite": overwrite,
        }
        self._next: Next = "batch"
        self._taken: TrainBatch | None = None
        self.summary: RunSummary | None = None
        """The summary of the run; None before its end."""

    # ---- start and end

    def __enter__(self) -> "OwnRun":
        """Start the run, and wait until engines and trainer are ready.

        Raises RecipeError and WrongInput before anything is started, and Failed.
        """
        check_recipe(self._recipe)
        check_start(self._recipe)
        from slipstream.backend.commands.plan_document import planned_publication_s
        from slipstream.backend.driver.loops.own_loop import OwnLoop
        from slipstream.backend.driver.run import run

        self._on_sigterm = _interrupt_on_sigterm()
        self._loop: OwnLoop = OwnLoop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="run")
        start = partial(run, self._recipe, own=self._loop, planned_s=planned_publication_s, **self._options)
        self._run: Future[RunSummary] = self._thread.submit(attended, self._recipe, start)
        try:
            self._batches: Batches = self._first(self._loop.started)
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the run: in good order at the end of the block, at once when it has raised. Raises Failed."""
        try:
            if kind is None:
                if self._next == "publish":  # the trainer holds a version that nobody serves
                    self.publish()
                self._ask("end")
                self.summary = self._run.result()
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """End whatever is still running."""
        while not self._run.done():
            self._loop.stop()
            wait([self._run], timeout=STOP_AGAIN_S)
        self._thread.shutdown()
        if self._on_sigterm is not None:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    # ---- the loop

    @property
    def version(self) -> int:
        """Policy version that the trainer holds: 0 is the initial policy."""
        return self._batches.core.version

    @property
    def steps_done(self) -> int:
        """Number of training steps that led to ``version``, those of earlier starts of the run included."""
        return self._batches.core.step

    @property
    def total_steps(self) -> int:
        """Number of training steps that the recipe asks for: ``run.steps``, or those of ``run.epochs``."""
        return self._loop.total_steps

    def batch(self) -> "TrainBatch":
        """Wait for the next batch, and return it: all of its trajectories, as numpy arrays.

        Raises Failed when the run has failed, and ``StepsDone`` when ``run.steps`` steps are done.
        """
        from slipstream.backend.driver.loops.training import BatchTaken, StepLost

        self._expect("batch")
        event = self._step_event(self._ask("go on"))
        while isinstance(event, StepLost):
            event = self._step_event(self._ask("go on"))
        if event is None:
            raise StepsDone(f"all {self.total_steps} steps of the recipe are done (run.steps)")
        assert isinstance(event, BatchTaken)
        self._next, self._taken = "step", event.batch.decoded()
        return self._taken

    def step(self, batch: "TrainBatch") -> Mapping[str, float]:
        """Train one step on the batch, or on a changed copy of it. Return its metrics by their tags.

        The batch is changed as by a transform (``slipstream.BatchTransform``): ``batch.keeping``,
        ``batch.rewarded``. Raises TrainerFailed when the trainer has died: it is started again, the groups of
        the batch come again, and the loop goes on with ``batch``. Raises Failed when the run has failed.
        """
        from slipstream.backend.driver.loops.own_loop import TrainBatch
        from slipstream.backend.driver.loops.training import StepTrained

        self._expect("step")
        if not isinstance(batch, TrainBatch):
            raise TypeError(f"step: found a {type(batch).__name__}, expected the batch that `batch` returned")
        changed = None if batch is self._taken else batch
        event = self._done(self._ask("go on", changed))
        assert isinstance(event, StepTrained)
        self._next, self._taken = "publish", None
        return event.metrics

    def publish(self) -> int:
        """Bring the new weights into all engines, verified as ``weights.verify`` says. Return their version.

        Running requests go on afterwards. A checkpoint is taken if one is due. Raises as ``step``.
        """
        from slipstream.backend.driver.loops.training import StepPublished

        self._expect("publish")
        event = self._done(self._ask("go on"))
        assert isinstance(event, StepPublished)
        self._next = "batch"
        return event.version

    def evaluate(self) -> float | None:
        """Answer the held-out prompts of ``eval`` greedily. Return their mean reward, which is also logged.

        None: an episode has failed, and a note in ``driver.log`` says why. Raises WrongInput without a
        section ``eval``.
        """
        from slipstream.backend.driver.loops.own_loop import OwnEvaluation

        if self._recipe.eval is None:
            raise WrongInput("eval: expected held-out prompts to evaluate on: the recipe has none")
        evaluated = self._ask("evaluate")
        assert isinstance(evaluated, OwnEvaluation)
        return evaluated.reward

    # ---- the other thread

    def _expect(self, verb: Next) -> None:
        if verb != self._next:
            raise RuntimeError(
                f"{verb}: found a call out of order, expected `{self._next}`: a step is `batch`, `step`, "
                "`publish`"
            )

    def _ask(self, verb: "Verb", batch: "TrainBatch | None" = None) -> "StepEvent | OwnEvaluation | None":
        answer: Answer = self._loop.call(verb, batch)
        return self._first(answer)

    def _step_event(self, answer: "StepEvent | OwnEvaluation | None") -> "StepEvent | None":
        from slipstream.backend.driver.loops.own_loop import OwnEvaluation

        assert not isinstance(answer, OwnEvaluation)
        return answer

    def _done(self, answer: "StepEvent | OwnEvaluation | None") -> "StepEvent | OwnEvaluation | None":
        from slipstream.backend.driver.loops.training import StepLost

        if isinstance(answer, StepLost):
            self._next = "batch"
            raise TrainerFailed(f"{answer.error}; it is started again, and `batch` waits for it")
        return answer

    def _first(self, answer: "Future[T]") -> T:
        """Return the answer. Raises what has ended the run before it."""
        waited: list[Future[Any]] = [answer, self._run]
        wait(waited, return_when=FIRST_COMPLETED)
        if not answer.done() or answer.exception() is not None:
            try:
                self._run.result()  # an error of the loop ends the run, which says what it is
            except asyncio.CancelledError:
                raise Failed("the run was cancelled") from None
            raise Failed("the run has ended: expected no further calls")
        return answer.result()


def _interrupt_on_sigterm() -> "signal._HANDLER | None":  # pyright: ignore[reportPrivateUsage]
    """Let SIGTERM end the block as Ctrl-C does, if it would end the process. Return the handler before."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or handler is not signal.SIG_DFL:
        return None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return handler


class StepsDone(RuntimeError):
    """All training steps of the recipe are done."""


STOP_AGAIN_S = 1.0
"""Seconds after which a run that is to end is asked again: it may have been between two waits."""
