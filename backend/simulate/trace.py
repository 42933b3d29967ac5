"""Reads the traces of a run, of ``monitor.trace_log`` and ``rollout.engine.request_trace``, into arrays."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.backend.monitor.trace_log import TRACES
from slipstream.configs.violations import RecipeError, Violation

FIELDS: dict[str, tuple[str, ...]] = {
    "request": ("engine", "start_s", "first_token_s", "end_s", "prompt_tokens", "new_tokens", "interrupted"),
    "step": ("version", "tokens", "end_s", "wait_s", "train_s", "step_s"),
    "publish": ("bytes_sent", "stall_s", "total_s", "end_s"),
}
"""Fields that are read of each kind of line. Other kinds and fields are ignored."""

Record = dict[str, Any]
"""The fields of one line."""

LONGEST_PAUSE_S = 15.0
"""Longest time between two steps of one life of a run, when a checkpoint begins. A restart takes longer."""

LEAST_STEPS = 3
"""Smallest number of steps that says how long a step takes."""


@dataclass(frozen=True)
class Requests:
    """Requests that gave at least one token. Legend: R requests, in the order of their ends."""

    engine_R: np.ndarray
    """int: index of the engine in the order of names."""
    start_R: np.ndarray
    first_token_R: np.ndarray
    end_R: np.ndarray
    prompt_tokens_R: np.ndarray
    new_tokens_R: np.ndarray
    interrupted_R: np.ndarray
    """bool: another request continued the completion, or none did."""

    def __len__(self) -> int:
        return len(self.end_R)

    def chosen(self, mask_R: np.ndarray) -> "Requests":
        return Requests(*(getattr(self, name)[mask_R] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Trace:
    """The last life of a run. Legend: S steps, each of which published a version at its end."""

    requests: Requests
    tokens_S: np.ndarray
    """Trained tokens, prompts included."""
    end_S: np.ndarray
    wait_S: np.ndarray
    train_S: np.ndarray
    step_S: np.ndarray
    stall_S: np.ndarray
    publish_S: np.ndarray
    bytes_S: np.ndarray

    @property
    def begin_s(self) -> float:
        """Time at which the first step began to wait for its batch."""
        return float(self.end_S[0] - self.step_S[0])

    @property
    def end_s(self) -> float:
        return float(self.end_S[-1])

    @property
    def seconds_per_step(self) -> float:
        """Mean time from the end of one step to the end of the next."""
        return (self.end_s - self.begin_s) / len(self.end_S)


def _read(path: Path, lines: dict[str, list[Record]], problems: list[Violation]) -> None:
    """Add the records of one file to ``lines`` by kind, and what is wrong with it to ``problems``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problems.append(Violation("--fit", str(path.parent), f"cannot read {path}: {reason}"))
        return
    written = text.splitlines()
    for number, line in enumerate(written, start=1):
        try:
            values = json.loads(line)
            kind = values["kind"]
            if kind in FIELDS:
                lines[kind].append({field: values[field] for field in FIELDS[kind]})
        except (ValueError, KeyError, TypeError) as error:
            if number < len(written):  # a killed run may leave its last line unfinished
                reason = f"missing {error}" if isinstance(error, KeyError) else "not a JSON object"
                problems.append(Violation(f"{path}, line {number}", line[:60], reason))


def read_trace(run: Path) -> Trace:
    """Read the trace in the folder of a run. Raises RecipeError with every problem."""
    lines: dict[str, list[Record]] = {kind: [] for kind in FIELDS}
    problems: list[Violation] = []
    paths = sorted(run.glob(TRACES))
    if not paths:
        raise RecipeError([Violation("--fit", str(run), f"no file {TRACES} in this folder")], str(run))
    for path in paths:
        _read(path, lines, problems)
    lines["request"].sort(key=lambda request: request["end_s"])
    steps = _last_life(lines["step"])
    publications = lines["publish"][len(lines["publish"]) - len(steps) :]
    requests = [line for line in lines["request"] if line["first_token_s"] is not None and line["new_tokens"]]
    if not problems and (len(steps) < LEAST_STEPS or len(publications) < len(steps) or not requests):
        reason = (
            f"since the run was last started {len(steps)} steps, {len(publications)} publications and "
            f"{len(requests)} answered requests; expected {LEAST_STEPS} steps or more, a publication for "
            "each of them, and requests"
        )
        problems.append(Violation("--fit", str(run), reason))
    if problems:
        raise RecipeError(problems, str(run))
    columns = {
        kind: {field: np.array([line[field] for line in chosen]) for field in FIELDS[kind]}
        for kind, chosen in (("request", requests), ("step", steps), ("publish", publications))
    }
    request, step, publish = columns["request"], columns["step"], columns["publish"]
    _, engines = np.unique(request["engine"], return_inverse=True)
    return Trace(
        Requests(
            engines,
            request["start_s"],
            request["first_token_s"].astype(float),
            request["end_s"],
            request["prompt_tokens"],
            request["new_tokens"],
            request["interrupted"],
        ),
        step["tokens"],
        step["end_s"],
        step["wait_s"],
        step["train_s"],
        step["step_s"],
        publish["stall_s"],
        publish["total_s"],
        publish["bytes_sent"],
    )


def _last_life(steps: list[Record]) -> list[Record]:
    """Return the steps since the run was last resumed.

    A life begins where much time has passed since the previous step, or where the clock has been set back.
    """
    first = 0
    for number, (before, step) in enumerate(pairwise(steps), start=1):
        between_s = step["end_s"] - step["step_s"] - before["end_s"]
        if abs(between_s) > LONGEST_PAUSE_S:
            first = number
    return steps[first:]
