"""``slipstream report RUN...`` and ``slipstream trace RUN``: a run folder as a page, or as a timeline."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.backend.commands.audit import audit_run
from slipstream.backend.commands.outcome import Failed, WrongInput, cannot_hold, no_run
from slipstream.backend.driver.start.identity import INPUTS
from slipstream.backend.monitor.course import read_course
from slipstream.backend.monitor.metrics import METRICS_FILE
from slipstream.backend.monitor.report.page import (
    EPISODE_BYTES,
    MOST_RUNS,
    RUNNING,
    AuditResult,
    differences,
    render,
    run_data,
)
from slipstream.backend.monitor.report.perfetto import trace_events
from slipstream.backend.monitor.report.timeline import read_events
from slipstream.backend.monitor.trace_log import TRACES
from slipstream.rollout.ledger.recovery import LEDGER
from slipstream.rollout.ledger.storage.database import LedgerBusy, LedgerError


def report(runs: Sequence[Path], out: Path | None, *, audit: bool) -> Path:
    """Write the page of the runs in ``runs``, and return its path. Runs may be running.

    ``out``: by default report.html in the folder of the first run. Raises WrongInput and Failed.
    """
    target = out or runs[0] / PAGE
    _check(runs, target)
    try:
        data = [
            run_data(run, _audited(run) if audit else NOT_AUDITED, episode_bytes=EPISODE_BYTES // len(runs))
            for run in runs
        ]
        for run, entry in zip(runs, data, strict=True):
            if sum(other["name"] == entry["name"] for other in data) > 1:
                entry["name"] = str(run)
        recipes = {entry["name"]: read_course(run).recipe for run, entry in zip(runs, data, strict=True)}
        page = render(data, differences(recipes) if len(runs) > 1 else [])
    except OSError as error:
        raise Failed(f"cannot read {error.filename or 'a run'}: {error.strerror or error}") from error
    # A device or a pipe is written to, and not replaced by a file.
    is_special = target.exists() and not target.is_file()
    partial = target if is_special else target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(page, encoding="utf-8")
        if not is_special:
            partial.replace(target)
    except OSError as error:
        raise Failed(f"cannot write {target}: {error.strerror}; choose another file with -o") from error
    return target


PAGE = "report.html"
NOT_AUDITED = AuditResult("none", ("not asked for",))


def _check(runs: Sequence[Path], target: Path) -> None:
    wrong = [
        no_run(run, f"{METRICS_FILE} or {INPUTS}")
        for run in runs
        if not any((run / name).exists() for name in (METRICS_FILE, INPUTS))
    ]
    wrong += cannot_hold(target, PAGE) if not wrong else []
    if len(set(map(os.path.realpath, runs))) < len(runs):
        wrong.append("a run is named twice; expected different folders")
    if len(runs) > MOST_RUNS:
        wrong.append(f"{len(runs)} runs; expected {MOST_RUNS} or fewer on one page")
    if wrong:
        raise WrongInput("\n".join(wrong))


def _audited(run: Path) -> AuditResult:
    """Audit a run, unless it is running or has no ledger."""
    if not (run / LEDGER).exists():
        return AuditResult("none", ("no ledger",))
    try:
        result = audit_run(run, lambda _: None)
    except LedgerBusy:
        return AuditResult("none", RUNNING)
    except LedgerError as error:
        return AuditResult("wrong", (str(error),))
    return AuditResult("wrong" if result.discrepancies else "clean", result.discrepancies)


def write_trace(run: Path, out: Path) -> str:
    """Write the timeline of a run's last start in Chrome's trace format, and return what was written.

    Raises WrongInput and Failed.
    """
    if not list(run.glob(TRACES)):
        raise WrongInput(no_run(run, f"file {TRACES}"))
    if problems := cannot_hold(out, "trace.json"):
        raise WrongInput("\n".join(problems))
    try:
        events = trace_events(read_events(run))
        if not events:
            raise WrongInput(f"{run}: no training step is finished yet, so there is no timeline")
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failed(f"cannot write {out}: {error.strerror or error}") from error
    return f"{out}: {len(events)} events; open it at https://ui.perfetto.dev"
