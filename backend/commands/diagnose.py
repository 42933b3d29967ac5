"""``slipstream diagnose RUN``: why a reward may not rise, from the files of the run alone."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from slipstream.backend.commands.outcome import Failed, WrongInput, no_run
from slipstream.backend.monitor.diagnosis.causes import LikelyCause, likely_causes
from slipstream.backend.monitor.diagnosis.evidence import Evidence, read_evidence
from slipstream.backend.monitor.diagnosis.signs import rises
from slipstream.backend.monitor.metrics import METRICS_FILE
from slipstream.backend.monitor.summary import read_end
from slipstream.backend.monitor.units import reward

WIDTH = 80
"""Columns of the text."""

NOTHING = "nothing alarming"
NO_STEP = "nothing to judge: driver.log says what the run does, or why it has ended"
MEANING = "`slipstream metrics NAME` says what a metric is, `slipstream report` draws it."


def diagnose(run: Path) -> str:
    """Return what may keep the reward of a run from rising, as text. Raises WrongInput and Failed."""
    if not (run / METRICS_FILE).exists():
        raise WrongInput(no_run(run, METRICS_FILE))
    try:
        evidence = read_evidence(run)
    except OSError as error:
        raise Failed(f"cannot read {error.filename or run}: {error.strerror or error}") from error
    return described(run.resolve().name, evidence, read_end(run))


def described(name: str, evidence: Evidence, end: str | None) -> str:
    """Return the diagnosis of a run as text. ``end``: how it has ended; None: it has not, or was killed."""
    lines = [_heading(name, evidence, end)]
    for number, each in enumerate(likely_causes(evidence), 1):
        lines += ["", *_explained(number, each)]
    if len(lines) > 1:
        return "\n".join([*lines, "", MEANING])
    return "\n".join([*lines, NOTHING if evidence.steps else NO_STEP])


def _heading(name: str, evidence: Evidence, end: str | None) -> str:
    facts = [f"{name}: {end or 'running or killed'}"]
    facts.append(
        f"{evidence.steps} step{'s' * (evidence.steps != 1)}" if evidence.steps else "no step is finished yet"
    )
    if rewards := evidence.series.get("reward/mean"):
        course = "rises" if rises(evidence) else "does not rise"
        facts.append(f"reward {reward(rewards[0])} -> {reward(rewards[-1])} ({course})")
    return "\n".join(wrap(", ".join(facts), WIDTH))


def _explained(number: int, likely: LikelyCause) -> Iterator[str]:
    cause = likely.cause
    yield from wrap(
        f"{number}. {cause.words}: {likely.figures}", WIDTH, subsequent_indent="   ", break_on_hyphens=False
    )
    yield f"   metric: {cause.metric}"
    yield from wrap(
        f"what to do: {cause.advice}",
        WIDTH,
        initial_indent="   ",
        subsequent_indent="   ",
        break_on_hyphens=False,
    )
