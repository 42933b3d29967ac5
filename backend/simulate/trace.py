"""``trace.jsonl`` of a run as arrays: see ``monitor.trace`` and ``rollout.engine.trace``."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.backend.monitor.trace import TRACE
from slipstream.configs.violations import RecipeError, Violation

FIELDS: dict[str, tuple[str, ...]] = {
    "request": ("engine", "start_s", "first_token_s", "end_s", "prompt_tokens", "new_tokens", "interrupted"),
    "step": ("version", "tokens", "end_s", "wait_s", "train_s", "step_s"),
    "publish": ("bytes_sent", "stall_s", "total_s", "end_s"),
}
"""Kinds of lines, and what is read of them. Further kinds and further fields are passed over."""

LONGEST_PAUSE_S = 15.0
"""Between two steps of one life of a run there is no more than the start of a checkpoint; to start Ray, the
engines and the trainer again takes longer."""

LEAST_STEPS = 3
"""Fewer steps say nothing about how long one takes."""


@dataclass(frozen=True)
class Requests:
    """Those that gave at least one token, legend: R requests, in the order of their ends."""

    engine_R: np.ndarray
    """int: number of the engine, by name."""
    start_R: np.ndarray
    first_token_R: np.ndarray
    end_R: np.ndarray
    prompt_tokens_R: np.ndarray
    new_tokens_R: np.ndarray
    interrupted_R: np.ndarray
    """bool: the answer went on in another request, or never."""

    def __len__(self) -> int:
        return len(self.end_R)

    def chosen(self, mask_R: np.ndarray) -> "Requests":
        return Requests(*(getattr(self, name)[mask_R] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Trace:
    """Of the last process of the run; legend: S steps. Each step published one version at its end."""

    requests: Requests
    tokens_S: np.ndarray
    """Prompts included."""
    end_S: np.ndarray
    wait_S: np.ndarray
    train_S: np.ndarray
    step_S: np.ndarray
    stall_S: np.ndarray
    publish_S: np.ndarray
    bytes_S: np.ndarray

    @property
    def begin_s(self) -> float:
        """When the first step began to wait for its batch."""
        return float(self.end_S[0] - self.step_S[0])

    @property
    def end_s(self) -> float:
        return float(self.end_S[-1])

    @property
    def seconds_per_step(self) -> float:
        """From end to end: what lies between the steps is counted."""
        return (self.end_s - self.begin_s) / len(self.end_S)


def read_trace(run: Path) -> Trace:
    """Raises RecipeError that says everything that is wrong with it."""
    path = run / TRACE
    lines: dict[str, list[dict[str, Any]]] = {kind: [] for kind in FIELDS}
    wrong: list[Violation] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(
            [Violation("--fit", str(run), f"cannot read {path}: {reason}")], str(path)
        ) from None
    written = text.splitlines()
    for number, line in enumerate(written, start=1):
        try:
            found = json.loads(line)
            kind = found["kind"]
            if kind in FIELDS:
                lines[kind].append({field: found[field] for field in FIELDS[kind]})
        except (ValueError, KeyError, TypeError) as error:
            if number < len(written):  # the last one may have been cut off when the run was killed
                reason = f"missing {error}" if isinstance(error, KeyError) else "not a JSON object"
                wrong.append(Violation(f"{path}, line {number}", line[:60], reason))
    steps = _last_life(lines["step"])
    publications = lines["publish"][len(lines["publish"]) - len(steps) :]
    requests = [line for line in lines["request"] if line["first_token_s"] is not None and line["new_tokens"]]
    if not wrong and (len(steps) < LEAST_STEPS or len(publications) < len(steps) or not requests):
        reason = (
            f"since the run was last started {len(steps)} steps, {len(publications)} publications and "
            f"{len(requests)} answered requests; expected {LEAST_STEPS} steps or more, a publication for "
            "each of them, and requests"
        )
        wrong.append(Violation("--fit", str(run), reason))
    if wrong:
        raise RecipeError(wrong, str(path))
    columns = {
        kind: {field: np.array([line[field] for line in found]) for field in FIELDS[kind]}
        for kind, found in (("request", requests), ("step", steps), ("publish", publications))
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


def _last_life(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps since the run was last resumed: between its lives there is time in which nothing was done.

    A life begins where much time has passed since the step before, or the machine's clock was set back.
    """
    first = 0
    for number, (before, step) in enumerate(pairwise(steps), start=1):
        between_s = step["end_s"] - step["step_s"] - before["end_s"]
        if abs(between_s) > LONGEST_PAUSE_S:
            first = number
    return steps[first:]
