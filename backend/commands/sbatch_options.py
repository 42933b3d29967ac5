"""Options of sbatch's own, as words and as ``SBATCH_*`` variables: what would break a job, and why.

sbatch takes several short options in one word, any beginning of a long one that is unique, and the last of
two that are the same. A word that is no option is the batch script for it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slipstream.backend.commands.slurm_jobs import CONTAINER, GPUS, IMAGE, MOUNTS
from slipstream.configs.schema import SlurmCluster

_ASKED = "the recipe and the options of submit say so already: "
_GPUS = f"{_ASKED}use --gpus-per-node, cluster.gpus_per_node or cluster.gres"
_TASKS = "leave it: there is one Ray on each node, which hands out its CPUs and GPUs"
_INSIDE = "the batch script runs on the host, and starts the container itself: use cluster.container"
_ALL = "the job needs the variables of its submission: --export=ALL,NAME=VALUE"
_NOTHING = "it submits nothing: use --print"
_MEMORY = "sbatch takes no second size beside --mem=0 of the batch script: use --mem=SIZE, of each node"
_OWNER = "the run's folder would be another user's: submit as that user"
_REFUSED = {
    "--nodes": f"{_ASKED}use --nodes",
    "--time": f"{_ASKED}use --time, which is checked",
    "--array": "its tasks would all drive the same run: use --array",
    "--gpus": _GPUS,
    **{f"--gpus-per-{part}": _GPUS for part in ("node", "task", "socket")},
    "--ntasks": _TASKS,
    **{f"--ntasks-per-{part}": _TASKS for part in ("node", "gpu", "socket")},
    **dict.fromkeys(("--gpu-bind", "--tres-bind", "--tres-per-task"), _TASKS),
    "--container": _INSIDE,
    "--wait": "submit returns at once: ask `slipstream status`",
    **dict.fromkeys(("--test-only", "--help", "--usage", "--version"), _NOTHING),
    "--wrap": "the job has a script already",
    "--chdir": "the job runs in the folder of submission: call submit in that folder",
    "--clusters": "status, logs and stop would ask another cluster: set SLURM_CLUSTERS for all of them",
    "--export-file": _ALL,
    **dict.fromkeys(("--mem-per-cpu", "--mem-per-gpu"), _MEMORY),
    **dict.fromkeys(("--uid", "--gid"), _OWNER),
    ":": "a heterogeneous job has several groups of nodes, and Ray needs one: leave it out",
}
"""Options of sbatch that break a job or its account, each with what to do in their place."""


def _named(names: str) -> list[str]:
    return [f"--{name}" for name in names.split()]


_LONG = dict(
    zip(
        "AadDeGhJMnNopqtuVWwx",
        _named(
            "account array dependency chdir error gpus help job-name clusters ntasks nodes output partition "
            "qos time usage version wait nodelist exclude"
        ),
        strict=True,
    )
)
"""Long names of short options, where they matter here."""

_SHORT_FLAGS = "hHkOQsuvVW"
_FLAGS = _named(
    "contiguous exclusive get-user-env help hold ignore-pbs nice no-kill no-requeue overcommit "
    "oversubscribe parsable propagate quiet reboot requeue spread-job stepmgr test-only usage "
    "use-min-nodes verbose version wait"
)
"""Options that take no word after them: they have no value, or one after ``=``."""

_VALUED = _named(
    "account begin comment constraint cpus-per-gpu cpus-per-task deadline dependency error exclude export "
    "gres hint input job-name licenses mail-type mail-user mem mem-bind nodefile nodelist open-mode output "
    "partition prefer priority profile qos reservation signal switches time-min tmp wckey"
)
_KNOWN = [*_REFUSED, *_FLAGS, *_VALUED]

_WARNING = re.compile(r"B:(SIG)?(USR1|10)(@\d+)?")
_SEVERAL = re.compile(r"\s--?[a-z]")
_APART = re.compile(r"(-\w)[\s=]+(.*)|(--[\w-]+)\s+(.*)")
_FREE_TEXT = ("--comment", "--job-name")

_VARIABLES = {"ARRAY_INX": "array", "TIMELIMIT": "time", "REQ_SWITCH": "switches", "MEM_PER_NODE": "mem"}
"""Variables of sbatch that are named otherwise than their options."""

_SLURM_OWN = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables of Slurm that say how it is reached, and nothing of a job."""


def options_in(given: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield each option as it was given, its long name and its value, which may be the next word; None: none.

    The name is empty for a word that is no option.
    """
    words = list(given)
    while words:
        word = words.pop(0)
        name, value = (word if word == ":" else ""), ""
        if word.startswith("--") and word.strip("-"):
            name, _, value = word.partition("=")
            name = _full(name)
        elif word.startswith("-") and word.strip("-"):
            rest = word[1:].lstrip(_SHORT_FLAGS)
            for flag in word[1 : len(word) - len(rest)]:
                yield word, _LONG.get(flag, f"-{flag}"), ""
            if not rest:
                continue
            name, value = _LONG.get(rest[0], f"-{rest[0]}"), rest[1:]
        if value or "=" in word or not name.startswith("-") or name in _FLAGS:
            yield word, name, value
        else:
            yield word, name, words.pop(0) if words and not words[0].startswith("-") else None


def _full(name: str) -> str:
    """Return the known option that a long name, or its beginning, stands for; without one, the name."""
    name = name.split()[0]
    return name if name in _KNOWN else next((known for known in _KNOWN if known.startswith(name)), name)


def option_names(given: Sequence[str]) -> set[str]:
    """Return the long names of options."""
    return {name for _, name, _ in options_in(given)}


def sbatch_problems(
    given: Sequence[str], cluster: SlurmCluster, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield which options of sbatch would break the job, and why.

    ``environment``: of sbatch, whose variables are checked as well where a job without them is another one.
    """
    seen: dict[str, str] = {}
    for word, name, value in options_in(given):
        if not name:
            yield f"--sbatch: {word!r} found, an option expected, such as --sbatch=--partition=big"
        elif _SEVERAL.search(word) and name not in _FREE_TEXT:
            yield f"--sbatch: {word!r} found, one option expected: give each an --sbatch of its own"
        elif reason := _reason(name, value or "", cluster):
            yield f"--sbatch={word}: {reason}"
        elif apart := _APART.fullmatch(word):
            joined = f"{apart[1]}{apart[2]}" if apart[1] else f"{apart[3]}={apart[4]}"
            yield f"--sbatch: {word!r} found, --sbatch={joined} expected"
        elif value is None and (name in _VALUED or name in _LONG.values() or len(name) == 2):
            yield f"--sbatch: {word!r} found, a value expected in the same word or in the next --sbatch"
        elif name in seen and name != "-v":
            yield f"--sbatch={word}: {seen[name]} found as well, of which sbatch takes the last: give one"
        else:
            seen[name] = f"--sbatch={word}"
    if clusters := environment.get("SBATCH_CLUSTERS"):
        yield f"SBATCH_CLUSTERS={clusters}: {_REFUSED['--clusters']}"


def _reason(name: str, value: str, cluster: SlurmCluster) -> str | None:
    """Return why an option breaks the job; None: it does not."""
    if name in _REFUSED:
        return _REFUSED[name]
    if name.startswith(("--container", "--no-container")):
        return _INSIDE
    if name == "--gres" and "gpu" in value:
        return _GPUS
    if name == "--gres" and cluster.gres not in (None, "none"):
        return f"sbatch takes the last --gres alone, and cluster.gres is {cluster.gres}"
    if name == "--export" and value.partition(",")[0] != "ALL":
        return _ALL
    if name == "--signal" and _WARNING.fullmatch(value) is None:
        return "another signal ends the run or its Ray: --signal=B:USR1@SECONDS expected"
    folder = Path(value).parent
    if name in ("--output", "--error") and not folder.is_absolute() and "%" not in str(folder):
        return None if folder.is_dir() else f"no folder {folder}, which sbatch does not make: make it first"
    return None


def option_of(variable: str) -> str:
    """Return the option that a variable ``SBATCH_*`` stands for."""
    name = variable.removeprefix("SBATCH_")
    return f"--{_VARIABLES.get(name, name.lower().replace('_', '-'))}"


def left_out(environment: Mapping[str, str], cluster: SlurmCluster) -> dict[str, str]:
    """Return the variables of an environment that a job does not inherit, each with the reason.

    These are the variables of a job in which it is submitted, whose sizes srun would take for its own, and
    those by which sbatch would break it.
    """
    found: dict[str, str] = {}
    for name, value in environment.items():
        if name in (CONTAINER, IMAGE, MOUNTS, GPUS):
            found[name] = "submit sets it"
        elif name.startswith("SLURM_") and name not in _SLURM_OWN:
            found[name] = "it is of the job around"
        elif name == "SBATCH_TIMELIMIT":
            continue  # the default of `submit --time`
        elif name.startswith("SBATCH_") and (reason := _reason(option_of(name), value, cluster)):
            found[name] = reason
    return found
