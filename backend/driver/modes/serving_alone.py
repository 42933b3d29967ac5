"""``slipstream serve`` without training: engines with the policy of ``model.path``, and gateways before them.

inputs ──► run folder, ledger ──► Ray ──► engines ──► in the roster ──► gateways, until the run is stopped

There is no trainer, and so nobody to compare the engines' weights with: each has read them from the files.
Turns are recorded in the ledger, and neither judged nor trained. With ``live.train``, ``run`` serves.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from slipstream.backend.cluster.actors import EngineActors
from slipstream.backend.cluster.placement import Placement, place_engines
from slipstream.backend.cluster.ray_cluster import driver_address, ray_cluster
from slipstream.backend.driver.assemble import live_turns, live_users
from slipstream.backend.driver.loops.job_end import job_end
from slipstream.backend.driver.loops.live_users import LiveUsers
from slipstream.backend.driver.loops.stop import Stop
from slipstream.backend.driver.processes.devices import Separate
from slipstream.backend.driver.processes.engines import (
    EngineLimits,
    InitialWeights,
    policy_engines,
)
from slipstream.backend.driver.processes.gateways import announcement
from slipstream.backend.driver.processes.places import EnginePlaces
from slipstream.backend.driver.processes.restart_limits import engine_limit
from slipstream.backend.driver.start.engine_model import write_engine_model
from slipstream.backend.driver.start.hub_models import record_commits, with_local_models
from slipstream.backend.driver.start.inputs import InputError, read_inputs
from slipstream.backend.driver.start.prepare import prepare_inputs
from slipstream.backend.driver.start.resume import open_run
from slipstream.backend.driver.start.run_folder import LOGS, permissions, with_absolute_paths
from slipstream.backend.monitor.progress import Progress
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.supervisor import EngineCounts, Supervisor
from slipstream.rollout.system.key import new_key
from slipstream.rollout.tokens.trajectory import TrajectoryHeader


@dataclass(frozen=True)
class Unlogged:
    """Implements ``rollout.collection.driver.listener.CollectionListener``."""

    progress: Progress

    def note(self, text: str) -> None:
        self.progress.note(text)

    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None:
        """Do nothing: there are no episodes."""

    def lost(self, loss: Loss, trajectories: Sequence[TrajectoryHeader], reason: str = "") -> None:
        """Do nothing: there are no groups."""


async def serve(
    config: RunConfig,
    progress: Progress,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    overwrite: bool = False,
) -> None:
    """Serve until the run is stopped, which raises Stopped. Raises InputError before anything is started."""
    stop = Stop(progress, job_end(config, os.environ, time.time()))
    absolute = with_absolute_paths(config)
    await stop.run(_serve(absolute, progress, resume, accept_changes, overwrite, stop))


async def _serve(
    config: RunConfig,
    progress: Progress,
    resume: bool,
    accept_changes: bool,
    overwrite: bool,
    stop: Stop,
) -> None:
    named, config = config, await with_local_models(config, progress.phase, resume=resume)
    await prepare_inputs(config, progress.phase)
    progress.phase("reading the model")
    inputs = read_inputs(config, trains=False)
    with permissions(config), ExitStack() as stack:
        folder, state = await open_run(config, inputs, progress, resume, accept_changes, overwrite=overwrite)
        stack.enter_context(state.lease.held(stop.fail))
        stack.callback(state.ledger.close)
        record_commits(named, config)
        progress.keep_in(folder)
        if state.control.step:
            raise InputError(
                f"{folder} has trained {state.control.step} steps, and without live.train only the policy of "
                "model.path is served: convert a checkpoint (slipstream convert megatron-to-hf), name it as "
                "model.path, and choose another run.name"
            )
        await write_engine_model(config, inputs.engine_model, progress.phase, again=accept_changes)
        listener = Unlogged(progress)
        turns = live_turns(config, inputs, state, progress.note)
        gate = AdmissionGate(state.control, state.intake, state.ledger, listener, live=turns)
        progress.phase("starting Ray")
        nodes = stack.enter_context(ray_cluster(config, batch_bytes=0, note=progress.note))
        placement = place_engines(nodes, config)
        actors = EngineActors(config, placement, folder / LOGS, inputs.engine_model.path)
        roster = EngineRoster(
            lambda: gate.core.sampled_version, limit=config.rollout.max_concurrent, epoch=state.ledger.epoch
        )
        limits = EngineLimits.of(config.rollout.engine, inputs.spec.geometry, config.run.step_timeout_s)
        live = live_users(config, limits, turns, new_key(), roster, folder / LOGS, listener.note)
        await _course(config, limits, roster, live, actors, placement, progress)


async def _course(
    config: RunConfig,
    limits: EngineLimits,
    roster: EngineRoster,
    live: LiveUsers,
    actors: EngineActors,
    placement: Placement,
    progress: Progress,
) -> None:
    """Start the engines and the gateways, and keep them until cancelled."""
    assert config.gateway is not None
    engines = config.rollout.engine
    supervisor = Supervisor(
        policy_engines(
            engines, actors, limits, Separate(), placement, EnginePlaces(placement), trainer_gpus=tuple
        ),
        roster,
        InitialWeights(),
        limit=engine_limit(config),
        counts=EngineCounts(len(placement.engines), engines.fewest_left, engines.most, engines.patience_s),
        note=progress.note,
    )
    serving = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as tasks:
            progress.phase("starting the engines")
            tasks.create_task(live.keep(driver_address(config.cluster)), name="live users")
            tasks.create_task(supervisor.run(serving), name="supervisor")
            await serving.wait()
            progress.note(announcement(config.gateway, config.run.folder, os.environ))
            progress.phase("serving until Ctrl-C or SIGTERM")
    finally:
        await asyncio.shield(live.stop())
        await asyncio.shield(supervisor.stop())
