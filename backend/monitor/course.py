"""Reads from ``metrics.jsonl`` the course of a run: the steps that led to its weights. Changes nothing.

A run that was resumed has done some steps twice, under different versions. The course has each training step
once: as it was done last.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from slipstream.backend.monitor.metrics import METRICS_FILE
from slipstream.rollout.system.lines import read_lines

Record = Mapping[str, Any]

TOKEN_LAG = "staleness/token_lag"


@dataclass
class Course:
    """The metrics of a run, by training step."""

    steps: dict[int, Record] = field(default_factory=dict[int, Record])
    """Record of each training step, by ``train/step``, ascending."""
    evaluations: dict[int, Record] = field(default_factory=dict[int, Record])
    """Record of each evaluation, by the number of training steps that led to the policy."""
    recipe: Mapping[str, object] = field(default_factory=dict[str, object])
    """The recipe with which the run was last started."""
    starts: int = 0
    """Number of times that the run was started."""

    @property
    def total_steps(self) -> int | None:
        """Number of training steps that the recipe asks for; None: it is not known."""
        run = self.recipe.get("run")
        steps = cast("Mapping[str, object]", run).get("steps") if isinstance(run, dict) else None
        return steps if isinstance(steps, int) else None

    @property
    def bound(self) -> int | None:
        """Bound of staleness in versions; None: it is not known, or nothing is stale, as in ``sft``."""
        if self.steps and not any("staleness/head_max" in record for record in self.steps.values()):
            return None
        rollout = self.recipe.get("rollout")
        settings = cast("Mapping[str, object]", rollout) if isinstance(rollout, dict) else {}
        bound = settings.get("max_head_offpolicyness")
        return bound if isinstance(bound, int) else None

    def series(self, tag: str) -> list[tuple[int, float]]:
        """Return (training step, value) of a tag where it has a value."""
        records = self.evaluations if tag.startswith("eval/") else self.steps
        return [
            (step, float(value))
            for step, record in records.items()
            if isinstance(value := record.get(tag), int | float)
        ]

    def lags(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return (training step, [(lag, trained tokens)])."""
        lags: list[tuple[int, list[tuple[int, int]]]] = []
        for step, record in self.steps.items():
            buckets = record.get(TOKEN_LAG)
            if isinstance(buckets, list):
                rows = cast("list[list[int]]", buckets)
                lags.append((step, [(first, n) for first, _, n in rows if n]))
        return lags


def read_course(run: Path) -> Course:
    """Return the course of the run in a folder; empty if it has no metrics yet. Raises OSError."""
    course, step_of = Course(), {0: 0}
    path = run / METRICS_FILE
    for record in read_lines(path) if path.exists() else ():
        version, step = record.get("step"), record.get("train/step")
        if not isinstance(version, int):
            continue
        if isinstance(text := record.get("run/recipe"), str):
            course.starts += 1
            course.recipe = _recipe(text)
        if isinstance(step, int):
            _forget(course, step_of, step)
            course.steps[step] = record
            step_of[version] = step
        elif "eval/reward" in record and version in step_of:
            course.evaluations[step_of[version]] = record
    return course


def _forget(course: Course, step_of: dict[int, int], step: int) -> None:
    """Remove ``step`` and later ones, which the run does again."""
    for later in [known for known in course.steps if known >= step]:
        del course.steps[later]
        course.evaluations.pop(later, None)
    for version in [version for version, known in step_of.items() if known >= step]:
        del step_of[version]


def _recipe(text: str) -> Mapping[str, object]:
    try:
        recipe: object = yaml.safe_load(text.removeprefix("```yaml\n").removesuffix("```"))
    except yaml.YAMLError:
        return {}
    return cast("Mapping[str, object]", recipe) if isinstance(recipe, dict) else {}
