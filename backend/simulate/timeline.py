"""Records what trainer and engines do when in a simulated run. ``picture`` draws it."""

from itertools import accumulate

import numpy as np

from slipstream.backend.simulate.world import World

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
