"""What the episode log costs a real run: CPU seconds of driver and trainer rank, with the log and without.

    python -m benchmarks.episode_log_run --steps 40 --runs 2

Each run is a quickstart in a process of its own. The driver says at its end what it has used itself; the rank
is read from /proc twice a second. Runs with and without the log take turns. Both cores are busy meanwhile.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

from slipstream.backend.monitor.process_usage import TICKS_PER_S

DRIVER = """
import atexit, resource, sys
def say():
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("driver_cpu_s", used.ru_utime + used.ru_stime, file=sys.stderr, flush=True)
atexit.register(say)
from slipstream.backend.cli.app import app
app()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs", type=int, default=2, help="runs with the log, and as many without")
    parser.add_argument("--inputs", type=Path, help="folder with the quickstart's policy and prompts")
    options = parser.parse_args()
    used: dict[str, list[dict[str, float]]] = {"{}": [], "null": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        inputs = (options.inputs or folder / ".inputs").resolve()
        paths = [
            f"model.path={inputs}/policy",
            f"data.path={inputs}/train.jsonl",
            f"eval.path={inputs}/heldout.jsonl",
        ]
        for number in range(options.runs):
            for episodes in used:
                settings = [*paths, f"run.root={folder}/runs", f"run.steps={options.steps}", "eval.every=0"]
                settings += [
                    f"run.name=run{number}-{episodes.strip('{}') or 'on'}",
                    f"log.episodes={episodes}",
                ]
                used[episodes].append(one_run(settings))
                print(json.dumps({"log.episodes": episodes, **used[episodes][-1]}), flush=True)
    for who in ("driver", "rank"):
        with_log, without = (mean(run[who] for run in used[each]) for each in ("{}", "null"))
        print(f"{who}: {with_log:.2f} s with the log, {without:.2f} s without: {with_log / without - 1:+.1%}")


def one_run(settings: list[str]) -> dict[str, float]:
    """Run the quickstart. Return the CPU seconds of its driver and of its rank."""
    run = subprocess.Popen(
        [sys.executable, "-c", DRIVER, "train", "quickstart", *settings],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    rank_s = 0.0
    while run.poll() is None:
        rank_s = max(rank_s, cpu_of_rank(run.pid))
        time.sleep(0.5)
    assert run.stderr is not None
    said = run.stderr.read()
    if run.returncode:
        sys.exit(said)
    [driver_s] = [float(line.split()[1]) for line in said.splitlines() if line.startswith("driver_cpu_s")]
    return {"driver": driver_s, "rank": rank_s}


def cpu_of_rank(driver: int) -> float:
    """Return the CPU seconds so far of the run's trainer rank; 0: there is none now."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if not (path / "cmdline").read_bytes().startswith(b"ray::TrainerActor"):
                continue
            if not is_below(int(path.name), driver):
                continue
            fields = (path / "stat").read_bytes().rpartition(b")")[2].split()
            return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        except (OSError, ValueError, IndexError):  # processes come and go
            continue
    return 0.0


def is_below(process: int, ancestor: int) -> bool:
    while process > 1:
        if process == ancestor:
            return True
        process = int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return False


if __name__ == "__main__":
    main()
