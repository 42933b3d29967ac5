"""The recipe's own schedule, others on the same work, and the split of the GPUs that suits it best."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.backend.simulate.account import Outcome
from slipstream.backend.simulate.gpu_split import GpuSplit, layout_of, model_of, splits, time_shared
from slipstream.backend.simulate.schedules import ONE_STEP_OFF, Schedule, compared, own_schedule
from slipstream.backend.simulate.timeline import Timeline
from slipstream.backend.simulate.workload import Workload
from slipstream.backend.simulate.world import SimulationStalled, World
from slipstream.configs.schema import RunConfig


@dataclass(frozen=True)
class Work:
    """What is simulated, whatever the schedule."""

    config: RunConfig
    seed: int
    lengths: np.ndarray | None = None
    """Of responses (see ``Workload``); None: as the recipe's model draws them."""
    held_out: int = 0
    """Prompts of each evaluation."""

    def workload(self) -> Workload:
        return Workload(
            model_of(self.config), self.config.rollout.sampling.max_new_tokens, self.seed, self.lengths
        )


@dataclass(frozen=True)
class Run:
    schedule: Schedule
    layout: GpuSplit
    outcome: Outcome | None
    stalled: str = ""
    """Why there is no outcome."""

    @property
    def tokens_per_s(self) -> float:
        return self.outcome.tokens_per_s if self.outcome else 0.0


@dataclass(frozen=True)
class Comparison:
    """All runs on one cluster."""

    own_schedule: Schedule
    own: Outcome
    layout: GpuSplit
    timeline: Timeline
    schedules: tuple[Run, ...] = ()
    splits: tuple[Run, ...] = ()
    """Of the recipe's own schedule."""

    @property
    def synchronous(self) -> Run:
        """The faster of the two synchronous schedules: what every speed-up is over."""
        return max(
            (run for run in self.schedules if run.schedule.bound == 0), key=lambda run: run.tokens_per_s
        )

    @property
    def policy(self) -> str:
        """The recipe's own consumption policy, by name."""
        return self.own_schedule.consumption.type

    def of(self, bound: int, interrupt: str) -> Run:
        """The recipe's own policy under another bound and interrupt mode."""
        return next(
            run
            for run in self.schedules
            if run.schedule.consumption == self.own_schedule.consumption
            and (run.schedule.bound, run.schedule.interrupt) == (bound, interrupt)
            and run.schedule.name != ONE_STEP_OFF
        )

    @property
    def recommended(self) -> Run:
        return max(self.splits, key=lambda run: run.tokens_per_s)

    def speedup(self, run: Run) -> float | None:
        """In trained tokens per second."""
        base = self.synchronous.tokens_per_s
        return run.tokens_per_s / base if run.outcome and base else None


def compare(work: Work, say: Callable[[str], None] = lambda text: None) -> Comparison:
    """Simulate the recipe, and unless it says ``simulate.compare: false`` all that it is compared with.

    Raises SimulationStalled if the recipe itself does not get through; of the others it is noted.
    """
    config, layout, workload = work.config, layout_of(work.config), work.workload()
    own = own_schedule(config)
    say(own.name)
    world = World(config, own, layout, workload, work.held_out)
    timeline = Timeline(world)
    outcome = world.run(timeline.advance)
    if not model_of(config).compare:
        return Comparison(own, outcome, layout, timeline)

    def runs(of: Sequence[tuple[Schedule, GpuSplit]]) -> Iterator[Run]:
        for number, (schedule, on) in enumerate(of, start=1):
            say(f"{number}/{len(of)} {schedule.title}, {on}")
            try:
                found = World(config, schedule, on, workload, work.held_out).run()
                yield Run(schedule, on, found)
            except SimulationStalled as stalled:
                yield Run(schedule, on, None, str(stalled))

    schedules = [(one, time_shared(layout) if one.shared else layout) for one in compared(config)]
    others = [(own, split) for split in splits(config, layout.gpus) if split != layout]
    asis = Run(own, layout, outcome)
    found = sorted([asis, *runs(others)], key=lambda run: run.layout.trainer_gpus)
    return Comparison(own, outcome, layout, timeline, tuple(runs(schedules)), tuple(found))
