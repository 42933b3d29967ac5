"""Engines that fail and come back."""

import asyncio

from slipstream.backend.driver.served_weights import ServedWeights
from slipstream.backend.simulate.engine import Engine
from slipstream.backend.simulate.pool import SimulatedPool
from slipstream.backend.simulate.workload import Workload
from slipstream.configs.schema.simulate import FailureModel


class Failures:
    """Seen by the loops as ``slipstream.rollout.engine.supervisor.Supervisor`` is."""

    def __init__(
        self, model: FailureModel, pool: SimulatedPool, weights: ServedWeights, workload: Workload
    ) -> None:
        self._model = model
        self._pool = pool
        self._weights = weights
        self._workload = workload
        self.count = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        if self._model.engine_mean_time_s is not None:
            async with asyncio.TaskGroup() as engines:
                for engine in self._pool.engines:
                    engines.create_task(self._of(engine, self._model.engine_mean_time_s))

    async def _of(self, engine: Engine, mean_time_s: float) -> None:
        random = self._workload.engine_failures(engine.index)
        while True:
            await asyncio.sleep(random.exponential(mean_time_s))
            self.count += 1
            await self._pool.remove(engine)
            await asyncio.sleep(self._model.engine_restart_s)
            engine.restart()

            async def admit() -> None:
                await self._pool.add(engine)

            if reason := await self._weights.bring_up_to_date(engine, admit):  # type: ignore[arg-type]
                raise AssertionError(f"a simulated publication cannot fail: {reason}")

    def condemn(self, name: str, reason: str) -> None:
        raise AssertionError(f"a simulated publication cannot fail: {name}: {reason}")
