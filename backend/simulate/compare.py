"""Simulates a recipe, the same work under other schedules, and the recipe on other splits of the GPUs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.backend.simulate.account import Outcome
from slipstream.backend.simulate.gpu_split import GpuSplit, layout_of, model_of, splits, time_shared
from slipstream.backend.simulate.schedules import ONE_STEP_OFF, Schedule, compared, recipe_schedule
from slipstream.backend.simulate.timeline import Timeline
from slipstream.backend.simulate.workload import Workload
from slipstream.backend.simulate.world import SimulationStalled, World
from slipstream.configs.schema import RunConfig

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
