"""Simulates a recipe, the same work under other schedules, and the recipe on other splits of the GPUs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from slipstream.backend.simulate.account import Outcome
from slipstream.backend.simulate.gpu_split import GpuSplit, layout_of, model_of, splits, time_shared
from slipstream.backend.simulate.schedules import ONE_STEP_OFF, Schedule, compared, recipe_schedule
from slipstream.backend.simulate.workload import Workload
from slipstream.backend.simulate.world import SimulationStalled, World
from slipstream.configs.schema import RunConfig

SAMPLES = 8192
"""Largest number of samples. When it is reached, every other sample is dropped and the interval doubles."""

ROWS = 32
"""Largest number of rows. With more engines, neighbours share a row."""


class Timeline:
    """Timeline of one run. ``World.run(timeline.advance)`` fills it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._every_s = 0.0
        self._next_s = 0.0
        self._bounds: list[int] = []
        self.times_s: list[float] = []
        self._running: list[list[int]] = []

    def advance(self, when: float) -> None:
        """Take a sample: the engines stay as they are now until ``when``."""
        if when < self._next_s:
            return
        self.times_s.append(when)
        sums = [0, *accumulate(engine.running for engine in self._world.pool.engines)]
        if not self._bounds:
            rows = min(ROWS, len(sums) - 1)
            self._bounds = [row * (len(sums) - 1) // rows for row in range(rows + 1)]
        self._running.append([sums[index] for index in self._bounds])
        if len(self.times_s) == SAMPLES:
            self.times_s, self._running = self.times_s[1::2], self._running[1::2]
            self._every_s = max(2 * self._every_s, when / SAMPLES)
        self._next_s = when + self._every_s

    @property
    def training(self) -> list[tuple[float, float]]:
        """Beginning and end of each training step, in seconds."""
        return self._world.trainer.training

    @property
    def pauses(self) -> list[tuple[float, float]]:
        """Beginning and end of each pause of the serving engines for a publication, in seconds."""
        return self._world.trainer.pauses

    @property
    def end_s(self) -> float:
        """End of the last publication."""
        return self.pauses[-1][1]

    @property
    def rows(self) -> list[str]:
        """Names of the engines in each row of ``running``."""
        names = [engine.name for engine in self._world.pool.engines]
        spans = zip(self._bounds, self._bounds[1:], strict=False)
        return [names[begin] if end == begin + 1 else f"{names[begin]}..{end - 1}" for begin, end in spans]

    def running(self, begin_s: float, end_s: float, columns: int) -> np.ndarray:
        """Return the mean number of requests per engine in equal parts of a time, float64 [rows, columns]."""
        times = np.array([0.0, *self.times_s])
        engines = np.diff(self._bounds)
        requests = np.diff(np.array(self._running), axis=1) / engines
        so_far = np.vstack([np.zeros(len(engines)), np.cumsum(requests * np.diff(times)[:, None], axis=0)])
        edges = np.linspace(begin_s, end_s, columns + 1)
        at_edges = np.array([np.interp(edges, times, row) for row in so_far.T])
        return np.diff(at_edges, axis=1) / (edges[1] - edges[0])


Costs = Callable[[GpuSplit], RunConfig]
"""Returns the recipe with the cost model of a split: publications take longer to more engines."""


@dataclass(frozen=True)
class Work:
    """Everything that a simulation depends on except schedule and layout."""

    config: RunConfig
    """The recipe, with the cost model of its own split."""
    seed: int
    lengths: np.ndarray | None = None
    """Response lengths (see ``Workload``); None: they are drawn from the recipe's model."""
    held_out: int = 0
    """Number of prompts of each evaluation."""
    costs: Costs | None = None
    """None: all splits have the costs of ``config``."""

    def on(self, split: GpuSplit) -> RunConfig:
        return self.config if self.costs is None else self.costs(split)

    def workload(self) -> Workload:
        return Workload(
            model_of(self.config), self.config.rollout.sampling.max_new_tokens, self.seed, self.lengths
        )


@dataclass(frozen=True)
class SimulatedRun:
    """One schedule on one layout, and the outcome unless the run stalled."""

    schedule: Schedule
    layout: GpuSplit
    outcome: Outcome | None
    stalled: str = ""
    """Reason why there is no outcome."""

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second, 0 for a run that stalled."""
        return self.outcome.tokens_per_s if self.outcome else 0.0


@dataclass(frozen=True)
class Comparison:
    """Every run on one cluster."""

    recipe: SimulatedRun
    """The run as the recipe describes it, which always has an outcome."""
    timeline: Timeline
    """Timeline of the recipe's run."""
    schedules: tuple[SimulatedRun, ...] = ()
    splits: tuple[SimulatedRun, ...] = ()
    """Runs of the recipe's schedule, the recipe's own split among them."""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the recipe's run."""
        assert self.recipe.outcome is not None
        return self.recipe.outcome

    @property
    def layout(self) -> GpuSplit:
        """Layout of the recipe's run."""
        return self.recipe.layout

    @property
    def synchronous(self) -> SimulatedRun:
        """The faster one of the two synchronous schedules: the base of every speed-up."""
        return max((run for run in self.schedules if run.schedule.bound == 0), key=_speed)

    def variant(self, bound: int, interrupt: str) -> SimulatedRun:
        """Return the run of the recipe's consumption policy under another bound and interrupt mode."""
        return next(
            run
            for run in self.schedules
            if run.schedule.consumption == self.recipe.schedule.consumption
            and (run.schedule.bound, run.schedule.interrupt) == (bound, interrupt)
            and run.schedule.name != ONE_STEP_OFF
        )

    @property
    def recommended(self) -> SimulatedRun:
        """The fastest split."""
        return max(self.splits, key=_speed)

    def speedup(self, run: SimulatedRun) -> float | None:
        """Return trained tokens per second over the synchronous schedule's; None if either run stalled."""
        base = self.synchronous.tokens_per_s
        return run.tokens_per_s / base if run.outcome and base else None


def compare(work: Work, say: Callable[[str], None] = lambda text: None) -> Comparison:
    """Simulate the recipe, and everything it is compared with unless ``simulate.compare`` is false.

    Raises SimulationStalled if the recipe's own run stalls; a stall of another run is part of the result.
    """
    config, layout, workload = work.config, layout_of(work.config), work.workload()
    schedule = recipe_schedule(config)
    say(schedule.name)
    world = World(config, schedule, layout, workload, work.held_out)
    timeline = Timeline(world)
    recipe = SimulatedRun(schedule, layout, world.run(timeline.advance))
    if not model_of(config).compare:
        return Comparison(recipe, timeline)

    def simulate(cases: Sequence[tuple[Schedule, GpuSplit]]) -> Iterator[SimulatedRun]:
        for number, (schedule, layout) in enumerate(cases, start=1):
            say(f"{number}/{len(cases)} {schedule.title}, {layout}")
            try:
                outcome = World(work.on(layout), schedule, layout, workload, work.held_out).run()
                yield SimulatedRun(schedule, layout, outcome)
            except SimulationStalled as stalled:
                yield SimulatedRun(schedule, layout, None, str(stalled))

    schedules = [(other, time_shared(layout) if other.shared else layout) for other in compared(config)]
    other_splits = [(schedule, split) for split in splits(config, layout.gpus) if split != layout]
    by_split = sorted([recipe, *simulate(other_splits)], key=lambda run: run.layout.trainer_gpus)
    return Comparison(recipe, timeline, tuple(simulate(schedules)), tuple(by_split))


def _speed(run: SimulatedRun) -> float:
    return run.tokens_per_s
