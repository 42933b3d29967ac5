"""Mistakes in a recipe: one ``Violation`` per mistake, all of them in one ``RecipeError``.

This module also says how every check shows a value, and which known name an unknown name resembles.
"""

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.configs.schema import RunConfig


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()
"""The value of a violation at which nothing is given. ``None`` is YAML's null."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 3


@dataclass(frozen=True)
class Violation:
    """One mistake: its dotted path, the value found there, and what was expected instead."""

    path: str
    value: object
    reason: str

    def __str__(self) -> str:
        value = "" if self.value is ABSENT else f" = {shown(self.value)}"
        return f"{self.path}{value}: {self.reason}"

    def renamed(self, names: Mapping[str, str]) -> "Violation":
        """Return a copy in which the settings ``names`` have their other names."""
        reason = self.reason
        for name, other in names.items():
            reason = reason.replace(name, other)
        return Violation(names.get(self.path, self.path), self.value, reason)


class RecipeError(Exception):
    """A recipe that cannot be run. ``violations`` holds every mistake, not only the first."""

    def __init__(
        self,
        violations: Iterable[Violation],
        source: str = "the recipe",
        config: "RunConfig | None" = None,
        unsure: Iterable[str] = (),
    ) -> None:
        """``config``: the recipe with defaults in place of what was refused; None: there is none. ``unsure``:
        settings whose value is such a default.
        """
        self.violations = tuple(violations)
        self.source = source
        self.config = config
        self.unsure = frozenset(unsure)
        super().__init__(str(self))

    def __str__(self) -> str:
        count = len(self.violations)
        noun = "violation" if count == 1 else "violations"
        return "\n  ".join([f"{count} {noun} in {self.source}:", *map(str, self.violations)])


def shown(value: object) -> str:
    """``value`` in at most about one line, with YAML's words for true, false and null."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _SHORT.repr(value)


def join(*keys: str) -> str:
    """A dotted path. A key that would break the line is shown quoted."""
    return ".".join(key if key.isprintable() and key else repr(key) for key in keys)


def nearest(name: str, known: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The name in ``known`` that is spelled most like ``name``; None if none is ``cutoff`` alike."""
    plain = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return plain[matches[0]] if matches else None


def one_of(choices: Iterable[object]) -> str:
    """``a, b or c``."""
    *head, last = (choice if isinstance(choice, str) else shown(choice) for choice in choices)
    return f"{', '.join(head)} or {last}" if head else last
