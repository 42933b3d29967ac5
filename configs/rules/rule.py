"""A rule between settings, and what the rules share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

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
        """Return whether ``check`` reads ``path``, a setting in it or a section around it."""
        return any(
            read == path or read.startswith(f"{path}.") or path.startswith(f"{read}.") for read in self.reads
        )


def setting(config: RunConfig, path: str, kind: type[T]) -> T | None:
    """The ``kind`` at a dotted path; None if it is null, or if no section on the way to it has it."""
    value: object = config
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            return None
    assert isinstance(value, kind), f"{path} is no {kind.__name__}"
    return value
