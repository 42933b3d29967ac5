"""Reads the figures of a run from what it has written: ``summary.json``, ``metrics.jsonl`` and its ledger."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from slipstream.backend.commands.audit import audit_run
from slipstream.backend.monitor.metrics import METRICS_FILE
from slipstream.backend.monitor.summary import read_summary
from slipstream.configs.document import read_document
from slipstream.rollout.ledger.storage.database import LedgerError
from slipstream.rollout.system.lines import read_lines

WARM_UP = 2
"""First steps that do not count: kernels are compiled and caches filled in them."""

MEDIANS = {
    "generate_tokens_per_s": "perf/generate_tokens_per_s",
    "train_tokens_per_s": "perf/train_tokens_per_s",
    "train_tflops": "perf/train_tflops",
    "stall_s": "perf/weight_update_stall_s",
    "update_s": "perf/weight_update_s",
    "weight_bytes": "perf/weight_bytes",
    "trainer_waits": "perf/trainer_wait_fraction",
    "distance_mean": "mismatch/logprob_abs_mean",
}
"""Figures that are a median over the steps after the warm-up, and their tags."""

LARGEST = {
    "distance_max": "mismatch/logprob_abs_max",
    "trainer_gpu_gib": "process/trainer_gpu_memory_gib",
    "engine_gpu_gib": "process/engines_gpu_memory_gib",
}
SMALLEST = {
    "trainer_rest_gib": "process/trainer_gpu_memory_gib",
    "engine_rest_gib": "process/engines_gpu_memory_gib",
}
"""With turns, about what the side that rests keeps; samples are ten seconds apart."""

Figures = dict[str, float]
"""Figures by name. One that a run does not have is missing."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended, and what is known of it."""

    name: str
    returncode: int | None
    """None: it was ended because it took longer than its limit."""
    seconds: float
    figures: Figures
    log: str
    """Path of its output."""
    last_lines: tuple[str, ...] = ()
    """The last lines of its output, if it has failed."""

    @property
    def failed(self) -> bool:
        """True if the command did not do what it was started for."""
        return self.returncode != 0

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def figures_of_run(folder: Path) -> Figures:
    """Return the figures of the run in a folder, as far as it got."""
    return {**_of_summary(folder), **_of_metrics(folder), **_of_audit(folder)}


def figures_of_step(output: str) -> Figures:
    """Return the figures of ``benchmarks.mfu``, whose last line is one JSON object."""
    try:
        told = json.loads(output.splitlines()[-1])
        return {name: float(told[name]) for name in ("mfu", "tflops", "tokens_per_s", "step_s", "memory_gb")}
    except (IndexError, KeyError, TypeError, ValueError):
        return {}


def _of_summary(folder: Path) -> Figures:
    summary = read_summary(folder)
    if summary is None:
        return {}
    found = {
        "done": float(summary.exit == "done"),
        "steps": summary.steps,
        "training_s": summary.training_s,
        "accuracy_before": summary.reward_before,
        "accuracy_after": summary.reward_after,
        "engine_restarts": summary.engine_restarts,
    }
    if summary.training_s > 0:
        found["run_tokens_per_s"] = summary.tokens_generated / summary.training_s
    return {name: float(value) for name, value in found.items() if value is not None}


def _of_metrics(folder: Path) -> Figures:
    try:
        records = list(read_lines(folder / METRICS_FILE))
    except OSError:
        return {}
    trained = [record for record in records if "train/step" in record]
    counted = trained[min(WARM_UP, max(len(trained) - 1, 0)) :]
    found: Figures = {}
    for name, tag in MEDIANS.items():
        if values := _values(counted, tag):
            found[name] = median(values)
    for names, choose in ((LARGEST, max), (SMALLEST, min)):
        for name, tag in names.items():
            if values := _values(records, tag):
                found[name] = choose(values)
    return found


def _values(records: list[dict[str, object]], tag: str) -> list[float]:
    return [value for record in records if isinstance(value := record.get(tag), int | float)]


def _of_audit(folder: Path) -> Figures:
    try:
        audit = audit_run(folder, lambda text: None)
    except LedgerError:
        return {}
    found: Figures = {"discrepancies": float(len(audit.discrepancies))}
    if audit.max_head_lag is not None:
        found["lag"] = float(audit.max_head_lag)
    if (bound := _bound(folder)) is not None:
        found["lag_bound"] = float(bound)
    return found


def _bound(folder: Path) -> int | None:
    rollout = (read_document(folder / "recipe.yaml", []).data or {}).get("rollout")
    bound = rollout.get("max_head_offpolicyness") if isinstance(rollout, dict) else None
    return bound if isinstance(bound, int) else None
