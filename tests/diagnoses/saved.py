"""The evidence of each run as a line of JSON, from which tests make the diagnosis again."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slipstream.backend.monitor.diagnosis.evidence import Evidence
from tests.environment import ROOT

SAVED = Path(__file__).with_name("saved.jsonl")

TAGS = re.compile(
    r"reward/(mean|std)|train/.*|staleness/(kl|token_mean)|mismatch/logprob_abs_mean"
    r"|rollout/(truncated_fraction|groups_(in_flight|ready))"
)
"""Tags that are kept."""

SETTINGS = (
    "actor.minibatches",
    "actor.objective",
    "actor.optimizer",
    "actor.drift",
    "rollout.max_head_offpolicyness",
    "rollout.batch_size",
    "rollout.sampling",
)
"""Parts of the recipe that are kept."""

MOST_REASONS = 4
"""Reasons of failed groups that are kept; the others are counted with the last of them."""


def line_of(name: str, evidence: Evidence, folder: Path) -> str:
    """Return what is kept of a run whose files are below ``folder``."""
    kept = replace(
        evidence,
        series={
            tag: [None if math.isnan(value) else float(f"{value:.4g}") for value in values]
            for tag, values in evidence.series.items()
            if TAGS.fullmatch(tag)
        },
        recipe=_kept(evidence),
        failures=_few(evidence.failures),
    )
    text = json.dumps({"name": name, **asdict(kept)}, ensure_ascii=False)
    return text.replace(str(folder), "FOLDER").replace(f"{ROOT}/", "")


def read_saved() -> dict[str, Evidence]:
    """Return the evidence of each run, by the name of its case."""
    found: dict[str, Evidence] = {}
    for line in SAVED.read_text(encoding="utf-8").splitlines():
        values: dict[str, Any] = json.loads(line)
        series = {
            tag: [math.nan if value is None else value for value in row]
            for tag, row in values["series"].items()
        }
        name = values.pop("name")
        values["series"] = series
        found[name] = Evidence(**values)
    return found


def _kept(evidence: Evidence) -> dict[str, Any]:
    recipe: dict[str, Any] = {}
    for path in SETTINGS:
        section, _, name = path.partition(".")
        recipe.setdefault(section, {})[name] = evidence.setting(path)
    return recipe


def _few(failures: Mapping[str, int]) -> dict[str, int]:
    pairs = list(failures.items())
    few = dict(pairs[:MOST_REASONS])
    for reason, count in pairs[MOST_REASONS:]:
        late = "rollout.judging.timeout_s" in reason
        same = next((each for each in few if ("rollout.judging.timeout_s" in each) == late), reason)
        few[same] = few.get(same, 0) + count
    return few
