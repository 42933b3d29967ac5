"""What Slipstream says of each field of another project's class: one verdict for every field.

A table has every field of the pinned versions exactly once. A test holds it against the installed version.

    allowed    a recipe may set it: a test shows that it does what it says, or it cannot do harm
    owned      Slipstream sets it; the reason names the setting to use
    untested   a recipe may set it if it also lists it in the setting ``untested``
    refused    it changes the model unseen, it cannot work here, or Slipstream does not have what it is for
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from slipstream.configs.violations import one_of

Kind = Literal["allowed", "owned", "untested", "refused"]


@dataclass(frozen=True)
class FieldVerdict:
    """Whether a recipe may set a field, and why."""

    kind: Kind
    why: str
    """Allowed: the test's file, or why the field is harmless. Otherwise the sentence that a user reads."""
    values: tuple[object, ...] | None = None
    """The only values that are allowed; None: all that the class takes."""
    items: tuple[str, ...] | None = None
    """The only items of the list; None: it is no list, or has any."""
    version: str | None = None
    """The only pinned version that has the field; None: all of them."""

    def permits(self, value: object) -> bool:
        """True if ``value`` is one of the values that are allowed, or a list of the items that are."""
        if self.items is not None:
            return isinstance(value, list) and all(item in self.items for item in cast("list[object]", value))
        return self.values is None or any(
            type(value) is type(known) and value == known for known in self.values
        )

    @property
    def choices(self) -> str:
        """The values that are allowed, in words."""
        if self.items is not None:
            return f"a list of: {one_of(self.items)}"
        return one_of(self.values or ())


Table = Mapping[str, FieldVerdict]


def allowed(
    names: str,
    why: str,
    values: tuple[object, ...] | None = None,
    *,
    items: tuple[str, ...] | None = None,
) -> Table:
    return _each(names, FieldVerdict("allowed", why, values, items))


def owned(names: str, why: str) -> Table:
    return _each(names, FieldVerdict("owned", why))


def untested(names: str, why: str) -> Table:
    return _each(names, FieldVerdict("untested", why))


def refused(names: str, why: str) -> Table:
    return _each(names, FieldVerdict("refused", why))


def only(version: str, *groups: Table) -> Table:
    """Return a table of fields that this pinned version alone has."""
    return {name: replace(verdict, version=version) for name, verdict in table(*groups).items()}


def table(*groups: Table) -> Table:
    """Return the table of all groups. Raises ValueError for a field that several of them have."""
    _require_once([name for group in groups for name in group])
    return {name: verdict for group in groups for name, verdict in group.items()}


def instead_of(setting: str) -> str:
    """Return the reason of a field that a setting of Slipstream's sets."""
    return f"Slipstream sets this field; use {setting} instead"


def _each(names: str, verdict: FieldVerdict) -> Table:
    _require_once(names.split())
    return dict.fromkeys(names.split(), verdict)


def _require_once(names: list[str]) -> None:
    if several := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"fields that are listed more than once: {', '.join(several)}")
