"""Engines that fail and come back."""

import asyncio
from functools import partial

from slipstream.backend.driver.weights.served_weights import ServedWeights
from slipstream.backend.simulate.engine import Engine
from slipstream.backend.simulate.pool import SimulatedPool
from slipstream.backend.simulate.workload import Workload
from slipstream.configs.schema.simulate import FailureModel


class Failures:
    """Stands for the supervisor of the engines: one task for each engine lets it fail and restarts it."""

    def __init__(
        self, model: FailureModel, pool: SimulatedPool, weights: ServedWeights[Engine], workload: Workload
    ) -> None:
        self._model = model
        self._pool = pool
        self._weights = weights
        self._workload = workload
        self.count = 0

    async def run(self) -> None:
        """Let engines fail until this is cancelled."""
        if self._model.engine_mean_time_s is not None:
            async with asyncio.TaskGroup() as engines:
                for engine in self._pool.engines:
                    engines.create_task(self._fail(engine, self._model.engine_mean_time_s))

    async def _fail(self, engine: Engine, mean_time_s: float) -> None:
        random = self._workload.engine_failures(engine.index)
        while True:
            await asyncio.sleep(random.exponential(mean_time_s))
            self.count += 1
            self._pool.remove(engine)
            await asyncio.sleep(self._model.engine_restart_s)
            engine.restart()
            admit = partial(self._pool.add, engine)
            if reason := await self._weights.bring_up_to_date(engine.address, admit):
                raise AssertionError(f"a simulated publication cannot fail: {reason}")
