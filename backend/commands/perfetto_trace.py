"""``slipstream trace RUN``: the timeline of a run's last start for Perfetto."""

import json
from pathlib import Path

from slipstream.backend.commands.outcome import Failed, WrongInput, cannot_hold, no_run
from slipstream.backend.monitor.report.perfetto import trace_events
from slipstream.backend.monitor.report.timeline import read_events
from slipstream.backend.monitor.trace_log import TRACES


def write_trace(run: Path, out: Path) -> str:
    """Write Chrome's trace format, and return what was written. Raises WrongInput and Failed."""
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
