"""``slipstream submit``: a recipe as a Slurm job with the nodes, the container and the time that it needs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import slipstream.slurm
from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.backend.commands.sbatch_options import left_out, option_names, option_of, sbatch_problems
from slipstream.backend.commands.slurm_jobs import CONTAINER, GPUS, IMAGE, MOUNTS, container_mounts
from slipstream.backend.driver.loops.job_end import SHORTEST_S
from slipstream.configs.document import read_document
from slipstream.configs.load import load_site, site_file
from slipstream.configs.rules.models import model_folder
from slipstream.configs.schema import ContainerConfig, RunConfig, SlurmCluster, is_on_hub
from slipstream.configs.schema.cluster import SiteConfig
from slipstream.configs.schema.judge import OwnEngines, own_engines
from slipstream.configs.schema.paths import model_settings

SBATCH_TIMEOUT_S = 120.0
"""Longest time for sbatch to accept or to refuse a job."""

MOST_SEEDS = 10_000
"""Largest range of seeds, each of which gets a folder. Most sites allow a tenth (MaxArraySize)."""

MODULES, NODE_DISK, RESTARTS = "SLIPSTREAM_MODULES", "SLIPSTREAM_TMP", "SLIPSTREAM_RESTARTS"
VENV = "SLIPSTREAM_VENV"
"""Variables by which slurm/train.sbatch knows modules, local disk, restarts and environment of a job."""

TASK = "%a"
"""What slurm/train.sbatch replaces in the arguments of a job by the number of its task in an array."""

_SEEDS = re.compile(r"\d+(-\d+(:0*[1-9]\d*)?)?(,\d+(-\d+(:0*[1-9]\d*)?)?)*(%0*[1-9]\d*)?")
_RANGE = re.compile(r"(\d+)-(\d+)")
_JOB = re.compile(r"\d+(_\d+)?")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d+){0,2})")


@dataclass(frozen=True)
class JobOptions:
    """Settings of a job that its recipe does not have."""

    nodes: int | None = None
    """None: as many as the recipe needs."""
    gpus_per_node: int | None = None
    """None: ``cluster.gpus_per_node``, fewer for a recipe that needs fewer in all, none for one of CPUs."""
    time: str | None = None
    """Time limit, as sbatch takes it."""
    sbatch: Sequence[str] = ()
    """Further options of sbatch."""
    seeds: str | None = None
    """Seeds of an array of runs, as ``sbatch --array`` takes them."""
    after: str | None = None
    """Number of a job that must have ended before."""


def batch_script() -> Path:
    """Return the path of the batch script in the installed package."""
    return Path(slipstream.slurm.__path__[0], "train.sbatch").resolve()


def container_of(config: RunConfig) -> ContainerConfig | None:
    """Return the container of a recipe's job; None for an environment on the nodes' file system."""
    return config.cluster.container if config.cluster.type == "slurm" else None


def container_variables(config: RunConfig) -> dict[str, str]:
    """Return the variables by which a recipe's job runs in its container. Without one there are none."""
    container = container_of(config)
    if container is None:
        return {}
    mounts = [*container.mounts, *map(str, _named_folders(config))]
    if config.checkpoint.local_dir is not None:  # the machine of the submission need not have it
        mounts.append(str(config.checkpoint.local_dir))
    return {
        CONTAINER: container.runtime,
        IMAGE: container.image,
        MOUNTS: container_mounts(mounts),
    }


def _named_folders(config: RunConfig) -> list[Path]:
    """Return the folders outside of the folder of submission that the recipe names, if they exist.

    Files of the hub are in the folder of HF_HOME, a variable that the job has too.
    """
    root = config.run.root
    folders = [root if root.is_dir() else root.parent]
    files = [file.path for file in (*config.training_files, *config.held_out_files)]
    models = [folder for name in model_settings() if (folder := model_folder(config, name)) is not None]
    folders += [path.parent for path in files if not is_on_hub(path)]
    folders += [folder for folder in models if not is_on_hub(folder)]
    if (cache := os.environ.get("HF_HOME")) and any(map(is_on_hub, (*files, *models))):
        folders.append(Path(cache))
    absolute = [folder for folder in folders if folder.is_absolute() and folder.is_dir()]
    return [folder for folder in absolute if folder != Path("/")]


def nodes_needed(config: RunConfig, verb: str, gpus_per_node: int) -> int:
    """Return the number of nodes on which trainer and engines find their GPUs.

    One node is shared if it has GPUs for all, and without GPUs by any number of processes. Otherwise the
    trainer has ``cluster.trainer_nodes``, and the engines have the next ones. Raises WrongInput with every
    reason why no number would do.

    ``verb``: ``train``, or ``sft``, which has no engines.
    """
    if problems := list(_misfits(config, verb, gpus_per_node)):
        raise WrongInput("\n".join(problems))
    engine, first = config.rollout.engine, _trainer_nodes(config) or 1
    alone = _gpus_on_one_node(config, verb)
    if alone is not None and (gpus_per_node < 1 or alone <= gpus_per_node):
        return 1
    if gpus_per_node < 1:
        return max(first, engine.nodes) if engine.colocated else first + engine.nodes
    ranks = config.actor.parallel.world_size
    trainer = -(-ranks // gpus_per_node)
    if verb == "sft":
        return trainer
    judge = own_engines(config.judge)
    if engine.colocated:
        return trainer + _further_nodes(judge, [trainer * gpus_per_node - ranks], gpus_per_node)
    beside = gpus_per_node // engine.ranks_per_node
    counts = [min(beside, engine.count - first) for first in range(0, engine.count, beside)]
    left = [gpus_per_node - count * engine.ranks_per_node for count in counts for _ in range(engine.nodes)]
    return first + len(left) + _further_nodes(judge, left, gpus_per_node)


def _gpus_on_one_node(config: RunConfig, verb: str) -> int | None:
    """Return the number of GPUs with which one node holds all of a recipe; None if it has several nodes.

    A recipe with ``cluster.trainer_nodes`` has its engines on other nodes in any case.
    """
    engine, judge, ranks = config.rollout.engine, own_engines(config.judge), config.actor.parallel.world_size
    if verb == "sft":
        return ranks
    if engine.nodes > 1 or _trainer_nodes(config) is not None:
        return None
    own = 0 if engine.colocated else engine.count * engine.ranks
    return ranks + own + (judge.count * judge.tensor_parallel if judge else 0)


def _misfits(config: RunConfig, verb: str, gpus_per_node: int) -> Iterator[str]:
    """Yield why nodes of ``gpus_per_node`` GPUs cannot hold the recipe, however many there are."""
    engine, ranks = config.rollout.engine, config.actor.parallel.world_size
    if gpus_per_node < 1:
        if config.cluster.device == "gpu":
            yield f"--gpus-per-node: {gpus_per_node} found, 1 or more expected, because cluster.device is gpu"
        return
    if verb == "sft":
        return
    if engine.ranks_per_node > gpus_per_node:
        nodes = "a node" if engine.nodes == 1 else f"{engine.nodes} nodes (rollout.engine.nodes)"
        yield (
            f"rollout.engine.tensor_parallel: an engine of {engine.ranks} GPUs does not fit on {nodes} of "
            f"{gpus_per_node} (--gpus-per-node): set rollout.engine.nodes to at least "
            f"{-(-engine.ranks // gpus_per_node)}"
        )
    judge = own_engines(config.judge)
    if judge is not None and judge.tensor_parallel > gpus_per_node:
        yield (
            f"judge.endpoint.tensor_parallel: an engine of {judge.tensor_parallel} GPUs does not fit on a "
            f"node of {gpus_per_node} (--gpus-per-node)"
        )
    trainer = -(-ranks // gpus_per_node)
    if engine.colocated:
        if engine.nodes > trainer:
            yield (
                f"rollout.engine.nodes: an engine on the trainer's GPUs (rollout.engine.colocated) is spread "
                f"over {engine.nodes} nodes, and {ranks} trainer ranks (actor.parallel) take {trainer}"
            )
    elif (given := _trainer_nodes(config)) is not None and given < trainer:
        yield (
            f"cluster.trainer_nodes: {given} nodes of {gpus_per_node} GPUs (--gpus-per-node) "
            f"found, at least {trainer} expected for {ranks} trainer ranks (actor.parallel)"
        )
    elif given is None and trainer > 1:
        yield (
            f"cluster.trainer_nodes: null means 1, but {ranks} trainer ranks (actor.parallel) need {trainer} "
            f"nodes of {gpus_per_node} GPUs: set it to {trainer}"
        )


def _gpus_of_a_node(config: RunConfig, verb: str) -> int:
    """Return the number of GPUs to ask of each node: less than all of them where one node does."""
    if config.cluster.device == "cpu":
        return 0
    of_node = slurm(config).gpus_per_node
    return min(of_node, _gpus_on_one_node(config, verb) or of_node)


def slurm(config: RunConfig) -> SlurmCluster:
    """Return the cluster of a recipe; its defaults for a recipe of one machine."""
    return config.cluster if config.cluster.type == "slurm" else SlurmCluster()


def _trainer_nodes(config: RunConfig) -> int | None:
    """Return the number of the trainer's nodes that the recipe names; None: it names none."""
    return config.cluster.trainer_nodes if config.cluster.type == "slurm" else None


def _further_nodes(judge: OwnEngines | None, left: list[int], gpus_per_node: int) -> int:
    """Return the number of nodes that the judge's own engines need beyond the GPUs ``left`` on others."""
    if judge is None:
        return 0
    size = judge.tensor_parallel
    without = max(0, judge.count - sum(gpus // size for gpus in left))
    return -(-without // (gpus_per_node // size))


def seconds(time: str) -> float | None:
    """Return the length of a time limit of sbatch; None if it is unlimited, as 0 is. Raises WrongInput.

    >>> seconds("90"), seconds("8:00:00"), seconds("3-12")
    (5400, 28800, 302400)
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(time)
    if match is None:
        raise WrongInput(f"--time: {time!r} found, MINUTES, HH:MM:SS or DAYS-HH[:MM[:SS]] expected")
    fields = [int(field) for field in match["fields"].split(":")]
    if match["days"] is None:
        # Without days sbatch reads M, M:S and H:M:S; with days H, H:M and H:M:S.
        hours, minutes, rest = ([0, *fields, 0] if len(fields) == 1 else [0, *fields])[-3:]
        return hours * 3600 + minutes * 60 + rest or None
    hours, minutes, rest = [*fields, 0, 0][:3]
    return int(match["days"]) * 86400 + hours * 3600 + minutes * 60 + rest or None


def option_problems(options: JobOptions) -> list[str]:
    """Return what is wrong with the options of a job, whatever its recipe."""
    problems: list[str] = []
    try:
        limit = None if options.time is None else seconds(options.time)
    except WrongInput as error:
        limit, problems = None, [str(error)]
    if limit is not None and limit < SHORTEST_S:
        problems.append(
            f"--time: {options.time} is {limit:.0f} s, {SHORTEST_S:.0f} s or more expected to start, "
            "to train and to end: ask for more"
        )
    if options.seeds is not None and _SEEDS.fullmatch(options.seeds) is None:
        problems.append(f"--array: {options.seeds!r} found, seeds such as 1,2,5 or 0-9 or 0-9%2 expected")
    for first, last in _RANGE.findall(options.seeds or ""):
        if int(first) > int(last):
            problems.append(
                f"--array: '{first}-{last}' found, the smaller seed first expected: {last}-{first}"
            )
        if int(last) - int(first) >= MOST_SEEDS:
            problems.append(f"--array: '{first}-{last}' found, at most {MOST_SEEDS:,} runs expected")
    if options.after is not None and _JOB.fullmatch(options.after) is None:
        problems.append(f"--after: {options.after!r} found, the number of a job expected, such as 1234")
    return problems


def _site_options(cluster: SlurmCluster, gpus: int, given: set[str]) -> list[str]:
    """Return the options of sbatch for the GPUs of each node and for what the site wants.

    ``given``: names of options that the user gives, which replace the site's. An option for no GPUs would be
    refused where Slurm counts none.
    """
    asked = f"--gpus-per-node={gpus}" if cluster.gres is None else f"--gres={cluster.gres}:{gpus}"
    named = {f"--{name}": getattr(cluster, name) for name in ("account", "partition", "qos")}
    return [
        *([asked] if gpus and cluster.gres != "none" else []),
        *(f"{name}={value}" for name, value in named.items() if value is not None and name not in given),
    ]


def job_variables(cluster: SlurmCluster, gpus: int) -> dict[str, str]:
    """Return the variables of a job, apart from its container's, by which the recipe or the site is followed.

    ``gpus``: GPUs of each node.
    """
    given: dict[str, str] = {}
    if cluster.gres == "none" and gpus:
        given[GPUS] = str(gpus)
    if cluster.modules:
        given[MODULES] = " ".join(cluster.modules)
    if cluster.network_interface is not None:
        # Without `=`, NCCL takes every interface whose name begins like that.
        given |= {f"{of}_SOCKET_IFNAME": cluster.network_interface for of in ("NCCL", "GLOO")}
        given["NCCL_SOCKET_IFNAME"] = f"={cluster.network_interface}"
    if cluster.node_disk is not None:
        given[NODE_DISK] = cluster.node_disk
    if "restarts" in cluster.model_fields_set:
        given[RESTARTS] = str(cluster.restarts)
    return given


@dataclass(frozen=True)
class Site:
    """The settings of this site, and the file that they come from; None: there is no such file."""

    settings: Mapping[str, object]
    file: Path | None


def this_site() -> Site:
    """Return the settings of this site. Raises RecipeError."""
    file = site_file(os.environ)
    return Site(load_site(file) if file is not None else {}, file)


def own_environment(config: RunConfig) -> dict[str, str]:
    """Return the variable that names this environment, for a job whose batch script would find no other one.

    slurm/train.sbatch looks into the folder of submission, then on the PATH.
    """
    found = os.environ.get(VENV) or Path(".venv/bin/ray").exists() or shutil.which("slipstream")
    if found or container_of(config) is not None or not Path(sys.prefix, "bin/ray").exists():
        return {}
    return {VENV: sys.prefix}


def origins(recipe: Path, overrides: Sequence[str], site: Site, sbatch: Sequence[str] = ()) -> dict[str, str]:
    """Return where each setting of the site in effect comes from, by its path in the recipe.

    ``sbatch``: further options of sbatch, which replace some.
    """
    given = (read_document(recipe, ()).data or {}).get("cluster")
    of_recipe = given if isinstance(given, dict) else {}
    named = [override.partition("=")[0].strip() for override in overrides]
    replaced = option_names(sbatch) & {"--account", "--partition", "--qos"}
    found: dict[str, str] = {}
    for name in SiteConfig.model_fields:
        path = f"cluster.{name}"
        if f"--{name}" in replaced:
            continue
        if any(key == path or key.startswith(f"{path}.") for key in named):
            found[path] = "the command line"
        elif name in of_recipe:
            found[path] = str(recipe)
        elif name in site.settings:
            found[path] = str(site.file)
    return found


def sbatch_command(
    config: RunConfig, verb: str, arguments: Sequence[str], options: JobOptions
) -> tuple[list[str], dict[str, str]]:
    """Return the command that submits a recipe, and the variables of the job.

    ``verb``: ``train`` or ``sft``. ``arguments``: the recipe, its overrides and flags. Raises WrongInput with
    every reason against the job.
    """
    problems, needed = option_problems(options), 1
    gpus = options.gpus_per_node
    if gpus is None:
        gpus = _gpus_of_a_node(config, verb)
    try:
        needed = nodes_needed(config, verb, gpus)
    except WrongInput as error:
        problems.append(str(error))
    problems += [*sbatch_problems(options.sbatch, slurm(config), os.environ), *_unmountable(config)]
    given = option_names(options.sbatch)
    if options.after and "--dependency" in given:
        problems.append("--after: --sbatch=--dependency found as well, of which sbatch takes one: give one")
    if options.nodes is not None and options.nodes < needed:
        problems.append(
            f"--nodes: {options.nodes} found, {needed} or more with {gpus} GPUs each (--gpus-per-node) "
            "expected for the trainer and the engines of the recipe"
        )
    if problems:
        raise WrongInput("\n".join(problems))
    command = ["sbatch", f"--nodes={options.nodes or needed}", *_site_options(slurm(config), gpus, given)]
    command += [f"--time={options.time}"] if options.time else []
    command += [f"--dependency=afterany:{options.after}"] if options.after else []
    command += [f"--array={options.seeds}"] if options.seeds else []
    own = [f"run.name={config.run.name}-seed{TASK}", f"run.seed={TASK}"] if options.seeds else []
    words = [*([verb] if verb == "sft" else []), *arguments, *own]
    return [*command, *options.sbatch, str(batch_script()), *words], {
        **container_variables(config),
        **job_variables(slurm(config), gpus),
        **own_environment(config),
    }


def _unmountable(config: RunConfig) -> Iterator[str]:
    """Yield the folders whose names a container would take for several, or for two ends of a mount."""
    for folder in [Path.cwd(), *_named_folders(config)] if container_of(config) else []:
        if {",", ":"} & set(str(folder)):
            yield f"cluster.container: {str(folder)!r} found, a folder without `,` or `:` expected: rename it"


def printed(
    command: Sequence[str],
    variables: Mapping[str, str],
    config: RunConfig | None = None,
    sources: Mapping[str, str] | None = None,
) -> str:
    """Return a submission as a line for a shell, after comments that say where its settings come from.

    ``sources``: from ``origins``, for settings of ``config``.
    """
    lines = [
        f"# {path}: {_yaml(getattr(slurm(config), path.partition('.')[2]))} ({source})"
        for path, source in (sources or {}).items()
        if config is not None
    ]
    cluster, environment = slurm(config) if config is not None else SlurmCluster(), os.environ
    without = left_out(environment, cluster)
    lines += [f"# {line}" for line in noted(command, environment, cluster, everything=True)]
    # By `env`, since shells such as csh and fish set no variables before a command.
    changes = [*(f"-u {name}" for name in without if name not in variables)]
    changes += [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join([*lines, " ".join([*(["env", *changes] if changes else []), shlex.join(command)])])


def noted(
    command: Sequence[str], environment: Mapping[str, str], cluster: SlurmCluster, *, everything: bool = False
) -> Iterator[str]:
    """Yield what becomes of the variables of sbatch in an environment: of all, or of those without effect."""
    without, named = left_out(environment, cluster), option_names(command[1:])
    for name in sorted(name for name in environment if name.startswith("SBATCH_")):
        option = option_of(name)
        told = f"{name}={' '.join(environment[name].split())}"  # a comment has one line
        if name in without:
            yield f"{told} is left out: {without[name]}"
        elif option in named and f"{option}={environment[name]}" not in command:
            yield f"{told} is replaced by {option}"
        elif everything:
            yield f"{told} has its effect ({option})"


def _yaml(value: object) -> str:
    return json.dumps(value.model_dump(mode="json") if isinstance(value, ContainerConfig) else value)


def own_settings(site: Site, sources: Mapping[str, str]) -> list[str]:
    """Return the site's settings in effect as overrides: a job reads no site file."""
    return [
        f"{path}={json.dumps(site.settings[path.partition('.')[2]])}"
        for path, source in sources.items()
        if site.file is not None and source == str(site.file)
    ]


def submit(command: Sequence[str], variables: Mapping[str, str], cluster: SlurmCluster | None = None) -> str:
    """Run sbatch and return what it prints, its warnings first.

    Raises WrongInput without Slurm, and Failed if sbatch refuses.
    """
    if shutil.which(command[0]) is None:
        raise WrongInput("no sbatch on the PATH: submit from a login node, or see the command with --print")
    without = left_out(os.environ, cluster or SlurmCluster())
    environment = {name: value for name, value in os.environ.items() if name not in without} | dict(variables)
    try:
        ended = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",  # a notice of the site need not be in the encoding of this shell
            timeout=SBATCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"sbatch has not answered in {SBATCH_TIMEOUT_S:.0f} s") from None
    if ended.returncode:
        raise Failed(f"sbatch refused the job: {ended.stderr.strip()}")
    return f"{ended.stderr.strip()}\n{ended.stdout.strip()}".strip()
