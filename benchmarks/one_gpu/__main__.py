"""Runs everything that one GPU allows, and compares its figures with their bounds.

    python -m benchmarks.one_gpu                  # about half an hour on a GPU of 80 GB
    python -m benchmarks.one_gpu --only a,c       # some of the parts
    python -m benchmarks.one_gpu --dry-run        # the same commands with tiny models on CPUs: minutes

    a  engine and trainer take turns: FlashAttention 3, Triton, weights through files
    b  engine and trainer at one time: weights by tensor, disk, delta
    c  log-probs of the trainer against the engine's: Transformer Engine's layers and plain ones
    d  a random model of Qwen3-0.6B's shape, 1,024 tokens: asynchronous, synchronous, by turns
    e  an engine in fp8 beside one in bfloat16
    f  MFU of a training step of Qwen3-1.7B's shape

The last line of the output is one JSON object with a key for each part. Runs and logs stay in ``--root``. The
exit status is 1 if a command has failed or a bound is broken. A dry run judges only what does not depend on a
GPU: the ends of the commands, audits and lags.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console

from benchmarks.harness import parser
from benchmarks.one_gpu.bounds import Verdict, passed, verdicts
from benchmarks.one_gpu.figures import Ended
from benchmarks.one_gpu.plan import PARTS, Inputs, commands
from benchmarks.one_gpu.run import make_inputs, run
from slipstream.backend.commands.gpu_doctor import ThisMachine
from slipstream.backend.monitor.tables import Columns, rows_table, table_console

PACKAGES = (
    "torch",
    "triton",
    "sglang",
    "sglang-kernel",
    "megatron-core",
    "transformer-engine",
    "ray",
    "transformers",
)
DRY = (
    "no figure below is one of a GPU: every run is in float32 on CPUs, with plain layers and attention, no "
    "engine is in fp8, and engine and trainer share cores"
)
"""What a dry run tells first."""

TABLE: Columns[Ended] = {
    "command": lambda row: row.name,
    "": lambda row: "failed" if row.failed else "done",
    "s": lambda row: f"{row.seconds:.0f}",
    "tokens/s": lambda row: _shown(row, "run_tokens_per_s", ",.0f"),
    "trained/s": lambda row: _shown(row, "train_tokens_per_s", ",.0f") or _shown(row, "tokens_per_s", ",.0f"),
    "TFLOP/s": lambda row: _shown(row, "train_tflops", ".3g") or _shown(row, "tflops", ".3g"),
    "MFU": lambda row: _shown(row, "mfu", ".3f"),
    "pause s": lambda row: _shown(row, "stall_s", ".3f"),
    "|dlogp| mean": lambda row: _shown(row, "distance_mean", ".2g"),
    "max": lambda row: _shown(row, "distance_max", ".2g"),
    "lag": lambda row: _shown(row, "lag", ".0f"),
    "accuracy": lambda row: _shown(row, "accuracy_after", ".1%"),
}


def _shown(row: Ended, name: str, form: str) -> str:
    return format(row.figures[name], form) if name in row.figures else ""


def parts_of(text: str) -> list[str]:
    """Return the parts that ``--only`` names, in the order of the plan. Raises ValueError."""
    named = [name.strip() for name in text.split(",")]
    if unknown := [name for name in named if name not in PARTS]:
        raise ValueError(f"--only {text}: found {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    return [part for part in PARTS if part in named]


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe(card: str) -> str:
    return f"{card}; " + ", ".join(f"{name} {number}" for name, number in versions().items())


def card_of(facts: Mapping[str, object]) -> str:
    """Return the name of the GPU. Exits with what to do if there is none, or more than one is seen."""
    gpus = facts.get("gpus")
    if isinstance(gpus, Sequence) and len(gpus) == 1:
        return str(gpus[0])
    seen = len(gpus) if isinstance(gpus, Sequence) else 0
    advice = (
        "choose one with CUDA_VISIBLE_DEVICES"
        if seen
        else "`slipstream doctor --gpu` says why; --dry-run needs none"
    )
    sys.exit(f"{seen} GPUs found, expected 1: {advice}")


def report(part: str, ended: Mapping[str, Ended], found: Sequence[Verdict], console: Console) -> None:
    """Print the commands of a part, their bounds, and what is known of those that failed."""
    console.print(rows_table(f"{part}: {PARTS[part]}", ended.values(), TABLE))
    marks = {True: "pass", False: "FAIL", None: "not judged"}
    for verdict in found:
        console.print(f"  {marks[verdict.kept]:10}  {verdict.bound}", markup=False, soft_wrap=True)
    for command in ended.values():
        if command.failed:
            why = "took too long" if command.returncode is None else f"ended with {command.returncode}"
            console.print(
                f"  {command.name} {why}; the last lines of {command.log}:", markup=False, soft_wrap=True
            )
            for line in command.last_lines:
                console.print(f"    {line}", markup=False, soft_wrap=True)


def as_json(ended: Mapping[str, Ended], found: Sequence[Verdict]) -> dict[str, object]:
    return {
        "pass": passed(found),
        "bounds": [{"bound": verdict.bound, "kept": verdict.kept} for verdict in found],
        "commands": {name: command.as_json() for name, command in ended.items()},
    }


def main() -> None:
    described = parser(__doc__)
    described.add_argument("--dry-run", action="store_true", help="tiny models on CPUs, few steps")
    described.add_argument("--only", default=",".join(PARTS), help="parts, as in a,c; default: all")
    described.add_argument(
        "--attention", default="fa3", help="SGLang's attention backend where it fits the card"
    )
    described.add_argument("--limit", type=float, default=900.0, help="seconds that a command may take")
    described.add_argument("--root", type=Path, help="folder of runs and logs, which are kept")
    options = described.parse_args()
    try:
        parts = parts_of(options.only)
    except ValueError as error:
        described.error(str(error))
    dry = options.dry_run
    card = "CPU, a dry run" if dry else card_of(ThisMachine().torch())
    root = (options.root or Path("runs", time.strftime("one-gpu-%Y%m%d-%H%M%S"))).resolve()
    root.mkdir(parents=True, exist_ok=True)
    console, told = table_console(), dict[str, object]()
    console.print(describe(card), markup=False, soft_wrap=True)
    if dry:
        console.print(DRY, markup=False, soft_wrap=True)
    inputs = Inputs.below(root / ".inputs")
    make_inputs(inputs, large=bool({"d", "e"} & set(parts)), dry=dry, say=console.print)
    for part in parts:
        ended: dict[str, Ended] = {}
        for command in commands(part, inputs, attention=options.attention, dry=dry):
            ended[command.name] = run(command, root, limit_s=options.limit)
        found = verdicts(part, ended, dry=dry)
        report(part, ended, found, console)
        told[part] = as_json(ended, found)
    print(
        json.dumps(
            {
                **told,
                "card": card,
                "versions": versions(),
                "dry_run": dry,
                "note": DRY if dry else None,
                "root": str(root),
            }
        )
    )
    sys.exit(not all(isinstance(each, dict) and each["pass"] for each in told.values()))


if __name__ == "__main__":
    main()
