"""A rule between settings, and what the rules share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import Violation

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A check of several settings together, or of a setting and the file that it names."""

    check: Callable[[RunConfig], Iterator[Violation]]
    reads: tuple[str, ...]
    """Path of every setting or section that ``check`` reads."""

    def is_affected_by(self, path: str) -> bool:
        """True if ``check`` reads ``path``, a setting in it or a section around it."""
        return any(
            read == path or read.startswith(f"{path}.") or path.startswith(f"{read}.") for read in self.reads
        )


def setting(config: RunConfig, path: str, kind: type[T]) -> T | None:
    """The ``kind`` at a dotted path; None if it is null, or if no section on the way to it has it.

    Of a list of sections it is the first one's that has it.
    """
    values: list[object] = [config]
    for name in path.split("."):
        values = [getattr(value, name, None) for value in values]
        values = [item for value in values if value is not None for item in _items(value)]
    if not values:
        return None
    value = values[0]
    assert isinstance(value, kind), f"{path} is no {kind.__name__}"
    return value


def _items(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else [value]
