"""The process in which a recipe's own source of prompts lives. Started by ``drawn_prompts``.

first request   OwnSource ──► {"ready": true}
the others      SourceRequest ──► {"value": groups, each as a row of the file of drawn prompts}
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from slipstream.configs.schema import PluginConfig
from slipstream.rollout.prompts.chat import prompt_problem
from slipstream.rollout.prompts.sources.drawn_prompts import Drawing, DrawnPrompts, SourceRequest
from slipstream.rollout.system.plugins import BuiltPlugin, PluginFailed
from slipstream.rollout.system.programs.hook_process import LOG, HookProcess, WrongAnswer, serve_answers

SERVE = "slipstream.rollout.prompts.sources.source_process.serve"
SETTING = "rollout.data_source"


class OwnSource(msgspec.Struct, array_like=True, frozen=True):
    """Setup of the process."""

    path: str
    """Import path of the class."""
    args: dict[str, object]
    drawn: int
    """Number of prompts that were drawn before."""


def own_drawing(
    source: PluginConfig, prompts: DrawnPrompts, logs: Path, *, ahead: int, timeout_s: float
) -> Drawing:
    """Return the drawing from ``rollout.data_source``. ``ahead``, ``timeout_s``: as of ``Drawing``."""
    setup = OwnSource(source.path, source.args, prompts.drawn)
    return Drawing(
        HookProcess(SERVE, msgspec.msgpack.encode(setup), logs / LOG),
        prompts,
        ahead=ahead,
        named=f"{SETTING} ({source.path})",
        timeout_s=timeout_s,
        limit="run.batch_timeout_s",
    )


class _Positions:
    """The source, and how many prompts it has given."""

    def __init__(self, setup: OwnSource) -> None:
        """Raises PluginError."""
        self._plugin = BuiltPlugin(SETTING, PluginConfig(path=setup.path, args=setup.args))
        self._next = setup.drawn

    def answer(self, request: SourceRequest) -> list[dict[str, object]]:
        """Return rows of the file of drawn prompts. Raises WrongAnswer."""
        try:
            rows = self._checked(self._plugin.call("prompts", self._next, request.draw), request.draw)
        except PluginFailed as error:
            raise WrongAnswer(f"has failed: {error}") from error
        self._next += len(rows)
        return rows

    def _checked(self, returned: object, count: int) -> list[dict[str, object]]:
        if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
            found = "None" if returned is None else f"a {type(returned).__name__}"
            raise self._plugin.wrong("prompts", f"returned {found}, expected a list of rows")
        rows = cast("Sequence[object]", returned)
        if not 1 <= len(rows) <= count:
            way_out = ": the order is endless, so begin again after the last prompt" if not rows else ""
            raise self._plugin.wrong("prompts", f"returned {len(rows)} rows, expected 1 to {count}{way_out}")
        return [self._row(position, row) for position, row in enumerate(rows, self._next)]

    def _row(self, position: int, row: object) -> dict[str, object]:
        """Return a row as it is written down. Raises PluginFailed."""
        if not isinstance(row, Mapping) or "prompt" not in row:
            raise self._wrong(position, f"{row!r:.80}, expected a mapping with `prompt` (and `label`)")
        columns = {str(name): value for name, value in cast("Mapping[object, object]", row).items()}
        if (problem := prompt_problem(columns["prompt"])) is not None:
            raise self._wrong(position, f"a row of which {problem}")
        made = {"prompt": columns.pop("prompt"), "label": columns.pop("label", None), "metadata": columns}
        try:
            json.dumps(made, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise self._wrong(position, f"a row that cannot be written down: {error}") from None
        return made

    def _wrong(self, position: int, problem: str) -> PluginFailed:
        return self._plugin.wrong("prompts", f"returned for position {position} {problem}")


def serve(descriptor: int) -> None:
    """Run the process: answer the owner's requests until it closes the connection."""

    def make(request: bytes) -> Callable[[bytes], object]:
        source = _Positions(msgspec.msgpack.decode(request, type=OwnSource))
        return lambda request: source.answer(msgspec.msgpack.decode(request, type=SourceRequest))

    serve_answers(descriptor, make)
