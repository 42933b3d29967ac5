"""``slipstream serve`` without training: engines with the policy of ``model.path``, and gateways before them.

inputs ──► run folder, ledger ──► Ray ──► engines ──► in the roster ──► gateways, until the run is stopped

There is no trainer, and so nobody to compare the engines' weights with: each has read them from the files.
Turns are recorded in the ledger, and neither judged nor trained. With ``live.train``, ``run`` serves.
"""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import ExitStack

from slipstream.backend.cluster.actors import EngineActors
from slipstream.backend.cluster.placement import place_engines
from slipstream.backend.cluster.ray_cluster import driver_address, ray_cluster
from slipstream.backend.driver.assemble import LiveTurns, ServedVersion, live_users
from slipstream.backend.driver.devices import Separate
from slipstream.backend.driver.engines import EngineLimits, NoTrainer, RayEngine
from slipstream.backend.driver.inputs import InputError, Inputs, read_inputs
from slipstream.backend.driver.job_end import stop_after_s
from slipstream.backend.driver.prepare import prepare_inputs
from slipstream.backend.driver.resume import RunState, open_run
from slipstream.backend.driver.run_folder import LOGS, permissions, with_absolute_paths
from slipstream.backend.driver.stop import Stop
from slipstream.backend.driver.unlogged import Unlogged
from slipstream.backend.monitor.progress import Progress
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collect.gate import AdmissionGate
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.engine.key import new_key
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.supervisor import Supervisor

MakeTurns = Callable[[RunConfig, RunState, AdmissionGate], LiveTurns]
"""Makes the turns of live users of a run."""


class InitialWeights:
    """Every engine that has started holds the version that is served: the initial one."""

    async def bring_up_to_date(self, engine: EngineAddress, admit: Callable[[], None]) -> str | None:
        """Admit the engine."""
        admit()
        return None


async def serve(
    config: RunConfig,
    progress: Progress,
    make_turns: MakeTurns,
    *,
    resume: bool = False,
    accept_changes: bool = False,
) -> None:
    """Serve until the run is stopped, which raises Stopped. Raises InputError before anything is started."""
    stop = Stop(progress, after_s=stop_after_s(config, os.environ, time.time()))
    absolute = with_absolute_paths(config)
    await stop.run(_serve(absolute, progress, make_turns, resume, accept_changes, stop))


async def _serve(
    config: RunConfig,
    progress: Progress,
    make_turns: MakeTurns,
    resume: bool,
    accept_changes: bool,
    stop: Stop,
) -> None:
    await prepare_inputs(config, progress.phase)
    progress.phase("reading the model")
    inputs = read_inputs(config)
    with permissions(config), ExitStack() as stack:
        folder, state = await open_run(config, inputs, progress, resume, accept_changes)
        stack.enter_context(state.lease.held(stop.fail))
        stack.callback(state.ledger.close)
        if state.control.step:
            raise InputError(
                f"{folder} has trained {state.control.step} steps, and without live.train only the policy of "
                "model.path is served: convert a checkpoint (slipstream convert megatron-to-hf), name it as "
                "model.path, and choose another run.name"
            )
        listener = Unlogged(progress)
        gate = AdmissionGate(state.control, state.intake, state.ledger, listener)
        progress.phase("starting Ray")
        nodes = stack.enter_context(ray_cluster(config, batch_bytes=0, note=progress.note))
        actors = EngineActors(config, place_engines(nodes, config), folder / LOGS)
        await _course(config, inputs, state, gate, make_turns, actors, progress)


async def _course(
    config: RunConfig,
    inputs: Inputs,
    state: RunState,
    gate: AdmissionGate,
    make_turns: MakeTurns,
    actors: EngineActors,
    progress: Progress,
) -> None:
    """Start the engines and the gateways, and keep them until cancelled."""
    rollout, logs = config.rollout, config.run.folder / LOGS
    roster = EngineRoster(ServedVersion(gate), limit=rollout.max_concurrent, epoch=state.ledger.epoch)
    limits = EngineLimits.of(config, inputs.spec.geometry)
    supervisor = Supervisor(
        [
            RayEngine(number, actors, limits, NoTrainer(), Separate())
            for number in range(rollout.engine.count)
        ],
        roster,
        InitialWeights(),
        restarts=rollout.engine.restarts,
        note=progress.note,
    )
    turns = make_turns(config, state, gate)
    live = live_users(config, turns, new_key(), roster, logs, progress.note)
    serving = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as tasks:
            progress.phase("starting the engines")
            tasks.create_task(live.keep(driver_address(config)), name="live users")
            tasks.create_task(supervisor.run(serving), name="supervisor")
            await serving.wait()
            progress.phase("serving until Ctrl-C or SIGTERM")
    finally:
        await asyncio.shield(live.stop())
        await asyncio.shield(supervisor.stop())
