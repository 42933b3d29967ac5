"""Checks of the place where a run is started, before Ray and before any input is read."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.backend.cluster.placement import place
from slipstream.backend.commands.machine import (
    HostFacts,
    Place,
    fp8_problems_of,
    host_facts,
    machine_problems,
)
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.commands.slurm_jobs import CONTAINER, IMAGE
from slipstream.backend.commands.submit import container_of
from slipstream.backend.driver.loops.job_end import SHORTEST_S, seconds_left
from slipstream.backend.monitor.trackers.opened import missing_packages
from slipstream.configs.installed.environment import (
    InstalledEnvironment,
    UnreadableRecord,
    has_gpus,
    read_record,
)
from slipstream.configs.schema import RunConfig
from slipstream.rollout.gateway.keys import KeysError, keys_file, read_keys


@dataclass(frozen=True)
class StartPlace:
    """The machine, the environment and the job in which a run is started."""

    has_gpus: bool
    environment: InstalledEnvironment | None
    """The record of its installation; None if there is none."""
    variables: Mapping[str, str]
    now: float
    """Seconds since the epoch."""
    machine: HostFacts


def start_place() -> StartPlace:
    """Look at this process's machine, environment and variables. Raises WrongInput."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    try:
        environment = read_record(Path(sys.prefix))
    except UnreadableRecord as error:
        raise WrongInput(str(error)) from None
    return StartPlace(visible and has_gpus(), environment, os.environ, time.time(), host_facts())


def check_start(config: RunConfig, where: StartPlace | None = None, *, place: Place = place) -> None:
    """Raise WrongInput with every reason why ``config`` cannot be run from here.

    ``place``: places what the command starts.
    """
    where = where or start_place()
    problems = [
        *_wrong_kind(config, where),
        *_wrong_container(config, where),
        *_no_time(config, where),
        *_wrong_address(config, where),
        *_unreadable_keys(config),
        *missing_packages(config.log),
        *fp8_problems_of(config, on_gpus=where.has_gpus),
        *machine_problems(config, where.machine, place),
    ]
    if problems:
        raise WrongInput("\n".join(problems))


def _wrong_kind(config: RunConfig, where: StartPlace) -> Iterator[str]:
    if where.environment is None:
        return
    device = config.cluster.device
    needed = "gpu" if device == "gpu" or (device == "auto" and where.has_gpus) else "cpu"
    if where.environment.kind == needed:
        return
    machine = "this machine has GPUs" if where.has_gpus else "this machine has none"
    reason = f"cluster.device is {device}" + (f" and {machine}" if device == "auto" else "")
    ways = {
        "gpu": "install for GPUs beside it (`make install GPU=1 VENV=.venv-gpu`), or set cluster.device=cpu",
        "cpu": "start it where GPUs are, or install for CPUs beside it (`make install GPU=0 VENV=.venv-cpu`)",
    }
    yield (
        f"cluster.device: the environment {sys.prefix} was installed for {where.environment.kind.upper()}s, "
        f"but the run needs one for {needed.upper()}s, because {reason}: {ways[needed]}"
    )


def _wrong_container(config: RunConfig, where: StartPlace) -> Iterator[str]:
    if config.cluster.type != "slurm":
        return
    container = container_of(config)
    expected = (container.runtime, container.image) if container else ("", "")
    actual = (where.variables.get(CONTAINER, ""), where.variables.get(IMAGE, ""))
    if actual != expected:
        yield (
            f"cluster.container: the job runs in {_words(actual)}, but the recipe asks for "
            f"{_words(expected)}: submit it with `slipstream submit RECIPE`, which starts that"
        )


def _words(container: tuple[str, str]) -> str:
    runtime, image = container
    return f"the {runtime} container {image}" if runtime or image else "no container"


def _wrong_address(config: RunConfig, where: StartPlace) -> Iterator[str]:
    address, kind = where.variables.get("RAY_ADDRESS"), config.cluster.type
    if kind == "ray" and not address:
        yield (
            "cluster.type: ray found, but RAY_ADDRESS is not set: set it to the HOST:PORT that "
            "`ray start --head` has printed"
        )
    if kind == "slurm" and not address:
        yield (
            "cluster.type: slurm found, but RAY_ADDRESS is not set, as it is in a job of Slurm: start "
            "the job with "
            '`slipstream submit RECIPE`, or with `sbatch "$(slipstream slurm-script)" RECIPE`'
        )
    if kind == "local" and address:
        yield (
            f"cluster.type: local found, but RAY_ADDRESS is set to {address}: unset it to run on this "
            "machine, or "
            "set cluster.type to ray to run on that cluster"
        )


def _unreadable_keys(config: RunConfig) -> Iterator[str]:
    if config.gateway is not None:
        try:
            read_keys(keys_file(config.gateway, config.run.folder))
        except KeysError as error:
            yield f"gateway.keys: {error}"


def _no_time(config: RunConfig, where: StartPlace) -> Iterator[str]:
    left = seconds_left(where.variables, where.now) if config.cluster.type == "slurm" else None
    if left is not None and left < SHORTEST_S:
        yield (
            f"--time: the end of the job is {left:.0f} s away, {SHORTEST_S:.0f} s or more expected to start, "
            "to train and to end: ask for more"
        )
