"""kill -9 of a running quickstart: the time until it trains again, and the tokens to generate again.

    python -m benchmarks.recovery [--kills 3] [--seed 1]

The driver is killed at seeded instants, its guard ends all other processes, and the run is resumed at once.
`seconds` lasts from the kill to the end of the next training step, with every process started anew. The
comparison is a run that keeps checkpoints only, and so loses everything generated since the last one.
"""

import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import parser
from slipstream.backend.checkpoint.folder import CheckpointFolder
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.ledger.rows.samples import SAMPLES, VOID
from slipstream.rollout.ledger.storage.database import LEDGER, open_for_reading

SAMPLES_PER_GROUP = 8
STEP_TIMEOUT_S = 300
SETTINGS = ("run.steps=10000", "eval.every=0", "eval.max_prompts=50", "checkpoint.every=5")


@dataclass
class Recovery:
    """Recovery from one kill. A group has 8 trajectories."""

    seconds: float
    groups_kept: int
    """Groups that were ready at the kill, or trained since the checkpoint, and are used as they were."""
    groups_continued: int
    groups_regenerated: int
    tokens_regenerated: int
    """Discarded tokens, and an upper bound on tokens of completions that were in memory only."""
    tokens_without_ledger: int
    """Tokens that a run with the same checkpoint and no ledger would have generated again."""


class Run:
    """The quickstart as a process."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "quickstart"
        self._root = root
        self._process = self._started()

    def restart(self) -> None:
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "slipstream.backend.cli",
            "train",
            "quickstart",
            f"run.root={self._root}",
        ]
        with (self._root / "output").open("a") as output:
            return subprocess.Popen(
                [*command, *SETTINGS, "--resume"], stdout=output, stderr=subprocess.STDOUT
            )

    def steps(self) -> int:
        """Return the number of training steps logged so far, over all lives of the run."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count('"reward/mean"') if metrics.exists() else 0

    def wait_for_steps(self, steps: int) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while self.steps() < steps:
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"no step in {STEP_TIMEOUT_S} s:\n{(self._root / 'output').read_text()[-2000:]}")
            time.sleep(0.02)

    def groups_taken_up(self) -> tuple[int, ...]:
        """Return the groups that the last resume reported: ready, continued, to be generated again."""
        report = (self._root / "output").read_text().rpartition("resumed from")[2].partition("\n")[0]
        return tuple(int(part.split()[0]) for part in report.rpartition(": ")[2].split(", "))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(120)


def recover(run: Run, delay_s: float) -> Recovery:
    """Kill the run, count what is left, and resume it."""
    run.wait_for_steps(run.steps() + 12)
    time.sleep(delay_s)
    began = time.monotonic()
    run.kill()
    looking = time.monotonic()
    in_memory, without_ledger = look(run.folder)
    looked_s = time.monotonic() - looking
    run.restart()
    run.wait_for_steps(run.steps() + 1)
    seconds = time.monotonic() - began - looked_s
    kept, continued, regenerated = run.groups_taken_up()
    return Recovery(round(seconds, 1), kept, continued, regenerated, in_memory, without_ledger)


def look(folder: Path) -> tuple[int, int]:
    """Return an upper bound on the tokens in memory only, and the tokens that are lost without a ledger."""
    with tempfile.TemporaryDirectory() as scratch:
        for file in folder.glob(f"{LEDGER}*"):
            shutil.copy(file, scratch)
        ledger = open_for_reading(Path(scratch) / LEDGER)
        checkpoint = CheckpointFolder(folder / "checkpoints", keep_last=1).latest()
        version = checkpoint.record.version if checkpoint else 0
        mean, since = ledger.execute(
            "SELECT avg(tokens), sum(tokens * (state = 'ready' OR step > ?)) FROM groups "
            "WHERE tokens IS NOT NULL",
            (version,),
        ).fetchone()
        (begun,) = ledger.execute("SELECT count(*) FROM groups WHERE state = 'admitted'").fetchone()
        (written,) = ledger.execute(
            "SELECT count(DISTINCT key) FROM samples JOIN groups ON groups.id = key / ? "
            "WHERE groups.state = 'admitted' AND samples.id >= since AND samples.state != ?",
            (SAMPLES, VOID),
        ).fetchone()
        ledger.close()
    return (
        round(mean / SAMPLES_PER_GROUP * (SAMPLES_PER_GROUP * begun - written)),
        round(since + mean * begun),
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=3)
    options.add_argument("--seed", type=int, default=1)
    arguments = options.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="slipstream-recovery-") as root:
        run = Run(Path(root))
        try:
            recoveries = [recover(run, rng.uniform(0, 1)) for _ in range(arguments.kills)]
        finally:
            run.end()
        audit, _ = audit_ledger(run.folder)
        ledger = open_for_reading(run.folder / LEDGER)
        discarded = dict(ledger.execute("SELECT epoch, sum(tokens) FROM discards GROUP BY epoch"))
        ledger.close()
    for epoch, recovery in enumerate(recoveries, start=1):
        recovery.tokens_regenerated += discarded.get(epoch, 0)
    rows = list(map(asdict, recoveries))
    columns: Columns[dict[str, float]] = {
        name.replace("_", " "): lambda row, name=name: f"{row[name]:,}" for name in rows[0]
    }
    table_console().print(rows_table("kills", rows, columns))
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(json.dumps({**medians, "kills": len(rows), "audit_clean": not audit.discrepancies}))


if __name__ == "__main__":
    main()
