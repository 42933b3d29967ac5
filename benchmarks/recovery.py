"""kill -9 of a running quickstart: how long until it trains again, and what has to be generated again.

    python -m benchmarks.recovery [--kills 3] [--seed 1]

The driver is killed at seeded instants, its guard ends the rest, and the run is resumed at once. `seconds` go
from the kill to the end of the next training step, all processes started anew. What is compared with: a run
that keeps checkpoints only, and so loses whatever was generated since the last one.
"""

import argparse
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

from rich.console import Console
from rich.table import Table

from slipstream.backend.checkpoint.folder import CheckpointFolder
from slipstream.rollout.ledger.audit import audit_ledger
from slipstream.rollout.ledger.database import open_for_reading
from slipstream.rollout.ledger.recovery import LEDGER
from slipstream.rollout.ledger.writer import SAMPLES

SAMPLES_PER_GROUP = 8
STEP_TIMEOUT_S = 300
SETTINGS = ("run.steps=10000", "eval.every=0", "eval.max_prompts=50", "checkpoint.every=5")


@dataclass
class Recovery:
    """Of one kill. A group has 8 trajectories."""

    seconds: float
    groups_kept: int
    """Ready at the kill, or trained since the checkpoint, and trained again as they were."""
    groups_continued: int
    groups_regenerated: int
    tokens_regenerated: int
    """Discarded ones, and those of answers that were in memory only: at most one answer's for each sample."""
    tokens_without_ledger: int
    """What a run with the same checkpoint and no ledger would have generated again."""


class Run:
    """The quickstart as a process."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "quickstart"
        self._root = root
        self._process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "slipstream.backend.cli",
            "train",
            "quickstart",
            f"run.root={self._root}",
        ]
        with (self._root / "output").open("a") as output:
            self._process = subprocess.Popen(
                [*command, *SETTINGS, "--resume"], stdout=output, stderr=subprocess.STDOUT
            )

    def steps(self) -> int:
        """Training steps logged so far, all lives."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count('"reward/mean"') if metrics.exists() else 0

    def wait_for_steps(self, steps: int) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while self.steps() < steps:
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"no step in {STEP_TIMEOUT_S} s:\n{(self._root / 'output').read_text()[-2000:]}")
            time.sleep(0.02)

    def groups_taken_up(self) -> tuple[int, ...]:
        """What the last resume said: ready, continued, to be generated again."""
        said = (self._root / "output").read_text().rpartition("resumed from")[2].partition("\n")[0]
        return tuple(int(part.split()[0]) for part in said.rpartition(": ")[2].split(", "))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(120)


def recover(run: Run, delay_s: float) -> Recovery:
    """Kill, look at what is left, resume."""
    run.wait_for_steps(run.steps() + 12)
    time.sleep(delay_s)
    began = time.monotonic()
    run.kill()
    looking = time.monotonic()
    in_memory, without = look(run.folder)
    looked_s = time.monotonic() - looking
    run.start()
    run.wait_for_steps(run.steps() + 1)
    seconds = time.monotonic() - began - looked_s
    kept, continued, regenerated = run.groups_taken_up()
    return Recovery(round(seconds, 1), kept, continued, regenerated, in_memory, without)


def look(folder: Path) -> tuple[int, int]:
    """Tokens that were in memory only, as an upper bound; tokens that are lost without a ledger."""
    with tempfile.TemporaryDirectory() as scratch:
        for file in folder.glob("ledger.sqlite*"):
            shutil.copy(file, scratch)
        ledger = open_for_reading(Path(scratch) / "ledger.sqlite")
        checkpoint = CheckpointFolder(folder / "checkpoints", keep_last=1).latest()
        version = checkpoint.record.version if checkpoint else 0
        mean, since = ledger.execute(
            "SELECT avg(tokens), sum(tokens * (state = 'ready' OR step > ?)) FROM groups "
            "WHERE tokens IS NOT NULL",
            (version,),
        ).fetchone()
        (begun,) = ledger.execute("SELECT count(*) FROM groups WHERE state = 'admitted'").fetchone()
        (written,) = ledger.execute(
            f"SELECT count(*) FROM (SELECT key FROM trajectories UNION SELECT key FROM partials) "
            f"JOIN groups ON groups.id = key / {SAMPLES} WHERE groups.state = 'admitted'"
        ).fetchone()
        ledger.close()
    return (
        round(mean / SAMPLES_PER_GROUP * (SAMPLES_PER_GROUP * begun - written)),
        round(since + mean * begun),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="slipstream-recovery-") as root:
        run = Run(Path(root))
        try:
            found = [recover(run, rng.uniform(0, 1)) for _ in range(arguments.kills)]
        finally:
            run.end()
        audit, _, _ = audit_ledger(run.folder / LEDGER)
        ledger = open_for_reading(run.folder / LEDGER)
        discarded = dict(ledger.execute("SELECT epoch, sum(tokens) FROM discards GROUP BY epoch"))
        ledger.close()
    for epoch, recovery in enumerate(found, start=1):
        recovery.tokens_regenerated += discarded.get(epoch, 0)
    table = Table("kill", *(name.replace("_", " ") for name in asdict(found[0])))
    for number, recovery in enumerate(found):
        table.add_row(str(number), *(f"{value:,}" for value in asdict(recovery).values()))
    Console().print(table)
    medians = {name: statistics.median(asdict(one)[name] for one in found) for name in asdict(found[0])}
    print(json.dumps(medians | {"kills": len(found), "audit_clean": not audit.discrepancies}))


if __name__ == "__main__":
    main()
