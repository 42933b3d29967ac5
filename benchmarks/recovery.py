"""Deaths of parts of a Slurm job: the seconds until it trains again, and the tokens to generate again.

    python -m benchmarks.recovery [--only WORD]      as root, with Slurm: tests/cluster/install_slurm.sh

Each kind is a job of its own on a real Slurm of four fake nodes, three of them the job's: the quickstart with
two engines. `seconds` last from the death to the end of the first training step after the loss was repaired,
`starting` is the part of them since the new processes were asked for. Then the run is stopped and audited.
The last line is one JSON object; exit code 1 if a row is bad.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import parser
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.ledger.rows.samples import SAMPLES, VOID
from slipstream.rollout.ledger.storage.database import LEDGER, open_for_reading
from tests.cluster.quickstart_job import submit_quickstart
from tests.cluster.slurm_cluster import ClusterError, SlurmCluster

SAMPLES_PER_GROUP = 8
TIMEOUT_S = 420.0
"""For each wait: to a first step, a noticed loss, a restart, an end."""
LINK_DOWN_S = 20.0
STALL_S = 60.0
FILE_SYSTEM_BYTES = 256 << 20
SETTINGS = (
    "run.steps=10000",
    "eval.every=0",
    "eval.max_prompts=8",
    "checkpoint.every=5",
    "rollout.engine.count=2",
    "rollout.engine.min_count=1",
)
STEP = r"step +\d+/10000"
RESTARTED = "Slurm has started this job again"


class Job:
    """The quickstart as a job of three nodes: node1 has the driver and a trainer rank, node3 an engine."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *settings: str) -> None:
        self.cluster = cluster
        self._folder = folder
        self._settings = settings
        self.run = folder / "runs/quickstart"
        self._earlier = ""
        self.in_memory = 0
        self.number = 0

    def submit(self, *arguments: str) -> None:
        """Submit the job, with ``--resume`` once it has run."""
        self._earlier = self.output()
        self._out.unlink(missing_ok=True)  # another job would write over it
        self.number = submit_quickstart(
            self.cluster, self._folder, *SETTINGS, *self._settings, *arguments, nodes=3
        )

    def output(self) -> str:
        """Return what all starts of the job have written."""
        return self._earlier + (self._out.read_text(errors="replace") if self._out.exists() else "")

    @property
    def _out(self) -> Path:
        return self._folder / "out.log"

    def wait_for(self, pattern: str, begin: int, count: int = 1) -> int:
        """Wait for ``pattern`` in the output from ``begin`` on. Return where its last match ends."""

        def found() -> list[re.Match[str]]:
            return list(re.finditer(pattern, self.output()[begin:]))

        try:
            self.cluster.wait_until(repr(pattern), lambda: len(found()) >= count, TIMEOUT_S)
        except ClusterError as error:
            raise ClusterError(f"{error}\n---- output ----\n{self.output()[-3000:]}") from None
        return begin + found()[count - 1].end()

    def kill(self, node: str, part: str) -> None:
        """kill -9 the processes of ``node`` whose command contains ``part``."""
        victims = [process.pid for process in self.cluster.processes(node) if part in process.command]
        if not victims:
            raise ClusterError(f"no process {part} on {node}")
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    def wait_for_end(self) -> None:
        self.cluster.wait(self.number, TIMEOUT_S)

    def stop(self) -> None:
        self.cluster.cancel(self.number, "--batch", "--signal=TERM")
        self.wait_for_end()

    def count_in_memory(self) -> None:
        """Note an upper bound on the tokens that were in memory only, once no process writes any more."""
        self.in_memory = in_memory(self.run)


@dataclass(frozen=True)
class Kind:
    """One kind of death."""

    name: str
    strike: Callable[[Job], None]
    again: tuple[str, ...] = ()
    """Patterns of the lines with which new processes begin; empty: none is started."""
    settings: tuple[str, ...] = ()


def engine_node(job: Job) -> None:
    job.cluster.kill_node("node3")


def trainer_rank(job: Job) -> None:
    job.kill("node1", "ray::TrainerActor")


def driver(job: Job) -> None:
    job.kill("node1", "slipstream train")
    job.wait_for_end()
    job.count_in_memory()
    job.submit("--resume")


def trainer_node(job: Job) -> None:
    job.cluster.kill_node("node2")


def head_node(job: Job) -> None:
    job.cluster.kill_node("node1")


def link_down(job: Job) -> None:
    job.cluster.link("node3", "down")
    threading.Event().wait(LINK_DOWN_S)
    job.cluster.link("node3", "up")


def scancel(job: Job) -> None:
    job.cluster.cancel(job.number)
    job.wait_for_end()
    job.submit("--resume")


def requeue(job: Job) -> None:
    job.cluster.scontrol("requeue", str(job.number))


def warning(job: Job) -> None:
    job.cluster.cancel(job.number, "--batch", "--signal=USR1")


def drained(job: Job) -> None:
    job.cluster.scontrol("update", "nodename=node3", "state=drain", "reason=maintenance")
    job.wait_for(STEP, len(job.output()), count=3)
    job.cluster.scontrol("update", "nodename=node3", "state=resume")


def file_system_full(job: Job) -> None:
    """Fill the file system of the run until the run says so and ends, then make room."""
    begin, filler = len(job.output()), job.run.parent / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    job.wait_for(FULL, begin)
    job.wait_for_end()
    job.count_in_memory()
    filler.unlink()
    job.submit("--resume")


def file_system_stalls(job: Job) -> None:
    """Keep the file system of the run from taking anything for a minute."""
    begin, runs = len(job.output()), str(job.run.parent)
    subprocess.run(["fsfreeze", "--freeze", runs], check=True)
    try:
        threading.Event().wait(STALL_S)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", runs], check=True)
    job.wait_for("the disk answers again", begin)


def two_at_once(job: Job) -> None:
    trainer_rank(job)
    engine_node(job)


FULL = "free space on this file system|the disk is full: make room"
PLACED, REVIVED, RESUMED = "is placed on", "the trainer is started again", "resumed from"
TWO_TRAINERS = ("cluster.trainer_nodes=2", "actor.parallel.data=2")

KINDS = (
    Kind("engine node", engine_node, (PLACED,)),
    Kind("trainer rank", trainer_rank, (REVIVED,)),
    Kind("driver", driver, (RESUMED,)),
    Kind("trainer node", trainer_node, (REVIVED,), TWO_TRAINERS),
    Kind("head node", head_node, (RESTARTED,)),
    Kind("link down 20 s", link_down),
    Kind("scancel", scancel, (RESUMED,)),
    Kind("requeue without --resume", requeue, (RESTARTED,)),
    Kind("Slurm's warning: time limit or preemption", warning, (RESTARTED,)),
    Kind("node drained and returned", drained),
    Kind("file system full", file_system_full, (RESUMED,)),
    Kind("file system stalls 60 s", file_system_stalls),
    Kind("two at once: trainer rank, engine node", two_at_once, (REVIVED, PLACED)),
)


@dataclass(frozen=True)
class Row:
    """The cost of one death."""

    kind: str
    seconds: float
    starting: float
    tokens_again: int
    """Discarded tokens; after the death of all processes also an upper bound on those in memory only."""
    is_clean: bool


def recover(kind: Kind, folder: Path) -> Row:
    """Let a job train, strike, wait until it trains again, stop it, and audit the run."""
    # A real Slurm gives a silent node minutes; with too little, it ends the job on a node whose link is down.
    lost_after_s = 60 if kind.strike is link_down else 10
    own_disk = kind.strike in (file_system_full, file_system_stalls)
    disk = small_file_system(folder / "runs") if own_disk else nullcontext()
    with disk, SlurmCluster(nodes=4, lost_after_s=lost_after_s) as cluster:
        job = Job(cluster, folder, *kind.settings)
        job.submit()
        begin = job.wait_for(STEP, 0, count=8)
        began = asked = time.monotonic()
        begin = len(job.output())
        kind.strike(job)
        repaired = 0 if kind.again else len(job.output())
        for pattern in kind.again:
            repaired = max(repaired, job.wait_for(pattern, begin))
            asked = time.monotonic()
        job.wait_for(STEP, repaired)
        ended = time.monotonic()
        job.stop()
        audit, _ = audit_ledger(job.run)
        ledger = open_for_reading(job.run / LEDGER)
        (discarded,) = ledger.execute("SELECT coalesce(sum(tokens), 0) FROM discards").fetchone()
        ledger.close()
    starting = round(ended - asked, 1) if kind.again else 0.0
    return Row(
        kind.name, round(ended - began, 1), starting, discarded + job.in_memory, not audit.discrepancies
    )


@contextmanager
def small_file_system(folder: Path) -> Iterator[None]:
    """Mount one of its own at ``folder``, which every node sees that is started within the block."""
    folder.mkdir()
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(FILE_SYSTEM_BYTES)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)  # tmpfs cannot be frozen
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def in_memory(run: Path) -> int:
    """Return an upper bound on the tokens of completions that the processes of ``run`` had in memory only."""
    with tempfile.TemporaryDirectory() as scratch:
        for file in run.glob(f"{LEDGER}*"):
            shutil.copy(file, scratch)
        ledger = open_for_reading(Path(scratch) / LEDGER)
        (mean,) = ledger.execute("SELECT avg(tokens) FROM groups WHERE tokens IS NOT NULL").fetchone()
        (begun,) = ledger.execute("SELECT count(*) FROM groups WHERE state = 'admitted'").fetchone()
        (written,) = ledger.execute(
            "SELECT count(DISTINCT key) FROM samples JOIN groups ON groups.id = key / ? "
            "WHERE groups.state = 'admitted' AND samples.id >= since AND samples.state != ?",
            (SAMPLES, VOID),
        ).fetchone()
        ledger.close()
    return round((mean or 0) / SAMPLES_PER_GROUP * (SAMPLES_PER_GROUP * begun - written))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", default="", metavar="WORD", help="only kinds whose name contains WORD")
    word = options.parse_args().only
    kinds = [kind for kind in KINDS if word in kind.name]
    if not kinds:
        print(
            f"--only {word}: no such kind; expected a part of {', '.join(k.name for k in KINDS)}",
            file=sys.stderr,
        )
        sys.exit(2)
    rows: list[Row] = []
    bad: dict[str, str] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="slipstream-recovery-") as folder:
            try:
                rows.append(recover(kind, Path(folder)))
                print(rows[-1], flush=True)
            except ClusterError as error:
                bad[kind.name] = str(error)
                print(f"{kind.name}: {error}", file=sys.stderr)
    bad |= {row.kind: "the audit is not clean" for row in rows if not row.is_clean}
    columns: Columns[Row] = (
        {name.replace("_", " "): lambda row, name=name: str(asdict(row)[name]) for name in asdict(rows[0])}
        if rows
        else {}
    )
    table_console().print(rows_table("deaths", rows, columns))
    worst = max((row.seconds for row in rows), default=0.0)
    print(json.dumps({"kinds": len(rows), "bad": sorted(bad), "worst_s": worst}))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
