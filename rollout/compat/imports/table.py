"""What the keys of another system become: one table of data for each system, ``verl.yaml`` and the like.

    set        rows of keys with a setting here. ``here`` is for readers; ``to`` has a rule for each key. A
               row with one plain setting for each key needs no ``to``. A key whose rule is null is set by
               hand.
    nothing    rows of keys for which nothing has to be set
    without    rows of keys without a counterpart, and the nearest one
    renamed    old names of keys and tables, and the new ones, of which the rows know
    part       the section that every configuration of reinforcement learning has
    theirs     the system's defaults of keys: as if a configuration said them that leaves them out
    always     settings of every import
    fallbacks  settings that a recipe cannot be without, if nothing in the configuration makes them

A rule is the path of a setting, whose value is that of the key; or a ``KeyRule``; or a list of rules.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import yaml

from slipstream.rollout.compat.imports.configurations import Several
from slipstream.rollout.compat.imports.launch_script import Flag
from slipstream.rollout.compat.imports.recipe import (
    MAPPED,
    NEEDS_NOTHING,
    REFUSES,
    UNKNOWN,
    FlagOutcome,
    ImportedRecipe,
    Settings,
)

Values = Mapping[str, Any]
"""The keys of a configuration, by dotted path."""

_ABSENT = "null: it is absent"
_NEGATIVE = re.compile(r"disable|skip|[._]no_")
"""Names of keys that are on where they are false."""

_PLAIN = re.compile(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+")
_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class NotSaid(ValueError):
    """A recipe cannot say the value of a key."""


@dataclass(frozen=True)
class KeyRule:
    """How the value of a key becomes the value of a setting. What is left out does not apply."""

    path: str = ""
    """The setting. ``*`` stands for what it stands for in the key."""
    why: str = ""
    """Why nothing has to be set: the key is ours by default."""
    when: Mapping[str, object] | None = None
    """Patterns of the values of other keys with which the rule holds. A list: one of them. ``!``: not it."""
    unless: Sequence[str] = ()
    """The rule holds only without these keys."""
    values: Mapping[str, object] | None = None
    """By the key's value, or a pattern of it: ours; a table of several settings; or null: ours by default."""
    parts: Mapping[str, str] | None = None
    """By pattern with one group: the setting that gets the number, or text, of the group."""
    items: Sequence[str] = ()
    """The settings of the items of a list."""
    several: str = ""
    """The setting that gets several files, each with a name, in place of ``path``."""
    form: Mapping[str, str] | None = None
    """By pattern of the whole text: the text that takes its place. The first that fits counts."""
    module: str = ""
    """The key with the name of the function in this key's file: together they are an import path."""
    times: Sequence[str] = ()
    """Keys to multiply with; those that are absent count as 1."""
    over: Sequence[str] = ()
    """Keys to divide by; those that are absent count as 1."""
    total: Sequence[str] = ()
    """Keys whose sum is a factor."""
    into: str = ""
    """The key that is divided by this one."""
    taken_from: str = ""
    """The key of which this one is subtracted."""
    least: float | None = None
    """The smallest value."""
    whole: bool = False
    """Rounds up."""
    negate: bool = False
    """The setting is the opposite."""
    name: bool = False
    """The value becomes a name of a folder."""


@dataclass(frozen=True)
class KeyRow:
    """Patterns of keys, what becomes of them, and the remark for the user."""

    kind: str
    keys: Sequence[str]
    rules: Sequence[Sequence[KeyRule] | None]
    """For each key; None: it is set by hand."""
    remark: str


class KeyTable:
    """The keys of one system."""

    def __init__(self, path: Path) -> None:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.rows = [_row(kind, row) for kind in ("set", "nothing", "without") for row in content[kind]]
        self.part: str = content["part"]
        self.renamed: Mapping[str, str] = content.get("renamed", {})
        self._names = [name for row in self.rows for name in row.keys]
        self.theirs: Values = content.get("theirs", {})
        self.always: Settings = content.get("always", {})
        self.fallbacks: Settings = content.get("fallbacks", {})

    @property
    def known(self) -> Iterator[str]:
        """Every key, and what stands before the ``*`` of a pattern."""
        return (key.removesuffix(".*") for row in self.rows for key in row.keys)

    def find(self, key: str) -> tuple[int, int] | None:
        """Return row and place of a key; None: it is unknown. A plain name goes before a pattern."""
        places = [(n, place) for n, row in enumerate(self.rows) for place in range(len(row.keys))]
        fits = [(n, place) for n, place in places if fnmatchcase(key, self.rows[n].keys[place])]
        return min(fits, key=lambda at: (-_precision(self.rows[at[0]].keys[at[1]]), at), default=None)

    def recipe(self, system: str, written: Values, name: str) -> ImportedRecipe:
        """Return the recipe of a configuration. ``name``: of the run. The loader has not seen it."""
        recipe = ImportedRecipe(system, "{}={}", fallbacks=dict(self.fallbacks))
        recipe.settings |= {"run.name": name, **self.always}
        written = {self._renamed(recipe, key, written): value for key, value in written.items()}
        values = {**self.theirs, **written}
        outcomes: dict[str, FlagOutcome] = {}
        said: dict[str, str] = {}
        last = (len(self.rows), 0)
        for key in sorted(values, key=lambda key: self.find(key) or last):
            before = dict(recipe.settings)
            outcome = self._outcome(recipe, key, values)
            if key in written:
                outcomes[key] = outcome
                for path in outcome.settings:
                    now, other = recipe.settings[path], said.get(path)
                    if other and isinstance(now, int | float) and before[path] != now:
                        recipe.notes.append(
                            f"{path}: {other} says {before[path]}, and {key} {now}, which counts"
                        )
                    said[path] = key
            else:
                changed = {path for path in recipe.settings if path not in before}
                recipe.defaults |= changed
        recipe.outcomes = [outcomes[key] for key in written]
        return recipe

    def _renamed(self, recipe: ImportedRecipe, key: str, written: Values) -> str:
        """Return the new name of a key, which the configuration does not say as well."""
        fits = [old for old in self.renamed if key == old or key.startswith(f"{old}.")]
        if not fits or self.find(key):
            return key
        old = max(fits, key=len)
        new = self.renamed[old] + key.removeprefix(old)
        if new in written:
            return key
        recipe.notes.append(f"{key} is an old name of {new}")
        return new

    def _outcome(self, recipe: ImportedRecipe, key: str, values: Values) -> FlagOutcome:
        value = values[key]
        flag, at = Flag(key, (_text(value),)), self.find(key)
        if at is None:
            is_empty = value in (None, {}) and any(name.startswith(f"{key}.") for name in self._names)
            return FlagOutcome(flag, NEEDS_NOTHING, "it is empty") if is_empty else FlagOutcome(flag, UNKNOWN)
        row = self.rows[at[0]]
        if value is None and (row.kind == "without" or (row.kind == "set" and row.rules[at[1]] is None)):
            return FlagOutcome(flag, NEEDS_NOTHING, _ABSENT)
        if value is False and row.kind == "without" and not _NEGATIVE.search(key):
            return FlagOutcome(flag, NEEDS_NOTHING, "it is off")
        if row.kind != "set":
            return FlagOutcome(flag, NEEDS_NOTHING if row.kind == "nothing" else REFUSES, row.remark)
        rules = row.rules[at[1]]
        if rules is None:
            return FlagOutcome(flag, REFUSES, row.remark)
        star = _star(row.keys[at[1]], key)
        try:
            return _applied(recipe, flag, rules, values, star)
        except NotSaid as error:
            return FlagOutcome(flag, REFUSES, f"{error}; {row.remark}".rstrip("; "))


def _row(kind: str, row: Mapping[str, Any]) -> KeyRow:
    keys: list[str] = row["keys"]
    here: list[str] = row.get("here", [])
    if "to" in row:
        to = cast("list[Any]", row["to"])
    else:
        to = here if len(here) == len(keys) and all(map(_PLAIN.fullmatch, here)) else [None] * len(keys)
    if kind == "set" and len(to) != len(keys):
        raise ValueError(f"{keys[0]}: {len(to)} rules for {len(keys)} keys")
    by_hand = f"set {', '.join(here)} by hand" if kind == "set" else row.get("why", "")
    nearest = f"the nearest is {row['nearest']}" if "nearest" in row else ""
    remark = "; ".join(filter(None, [by_hand, row.get("remark", ""), nearest])).replace("`", "")
    return KeyRow(kind, keys, [_rules(each) for each in to] if kind == "set" else [], remark)


def _rules(written: Any) -> list[KeyRule] | None:
    if written is None:
        return None
    return [KeyRule(path=each) if isinstance(each, str) else KeyRule(**each) for each in _list(written)]


def _precision(pattern: str) -> int:
    return len(pattern) if "*" in pattern else 1_000


def _star(pattern: str, key: str) -> str:
    return key.removeprefix(pattern.removesuffix("*")) if pattern.endswith("*") else ""


def _applied(
    recipe: ImportedRecipe, flag: Flag, rules: Sequence[KeyRule], values: Values, star: str
) -> FlagOutcome:
    """Apply every rule that holds. Raises NotSaid."""
    value, paths, reasons = values[flag.name], list[str](), list[str]()
    if isinstance(value, Several):
        raise NotSaid(f"several values, {_text(value)}, where a run has one")
    for rule in rules:
        if (reason := _does_not_hold(rule, values)) or (reason := rule.why):
            reasons.append(reason)
        elif value is None and "null" not in (rule.values or {}):
            reasons.append(_ABSENT)
        else:
            settings = _settings(rule, value, values, star)
            recipe.settings |= settings
            paths += settings
            reasons += [] if settings else [f"{_text(value)} is what Slipstream does"]
    if paths:
        return FlagOutcome(flag, MAPPED, ", ".join(dict.fromkeys(paths)))
    return FlagOutcome(flag, NEEDS_NOTHING, reasons[-1])


def _does_not_hold(rule: KeyRule, values: Values) -> str:
    """Return why a rule does not hold; "" if it does."""
    for key in rule.unless:
        if values.get(key) is not None:
            return f"{key} says it"
    for key, wanted in (rule.when or {}).items():
        options = cast("list[Any]", wanted) if isinstance(wanted, list) else [wanted]
        if not any(_fits(_text(values.get(key)), _text(option)) for option in options):
            return f"it counts only with {key}: {_text(wanted)}"
    return ""


def _fits(value: str, pattern: str) -> bool:
    is_not, pattern = pattern.startswith("!"), pattern.removeprefix("!").lower()
    try:
        return (float(value) == float(pattern)) != is_not
    except ValueError:
        return fnmatchcase(value.lower(), pattern) != is_not


def _settings(rule: KeyRule, value: Any, values: Values, star: str) -> Settings:
    """Return the settings of a value; none: it is what Slipstream does. Raises NotSaid."""
    path = rule.path.replace("*", star)
    if rule.values is not None:
        ours = _translated(rule.values, _text(value))
        if ours is None:
            return {}
        return {path: ours} if path else dict(cast(Settings, ours))
    if rule.parts is not None:
        return _parts(rule.parts, _text(value))
    if rule.items:
        return dict(zip(rule.items, _list(value), strict=False))
    if rule.several:
        return _files(rule, _list(value))
    if rule.module:
        return {path: _import_path(value, values.get(rule.module))}
    return {path: _converted(rule, value, values)}


def _translated(by_value: Mapping[str, object], value: str) -> object:
    for pattern, ours in by_value.items():
        if fnmatchcase(value.lower(), str(pattern).lower()):
            return ours
    raise NotSaid(f"{value!r} has no counterpart; these have: {', '.join(map(str, by_value))}")


def _parts(by_pattern: Mapping[str, str], value: str) -> Settings:
    found = {path: re.search(pattern, value) for pattern, path in by_pattern.items()}
    settings = {path: _scalar(match[1]) for path, match in found.items() if match}
    if not settings:
        raise NotSaid(f"{value!r} cannot be read")
    return settings


def _files(rule: KeyRule, files: list[Any]) -> Settings:
    names = [_formed(rule, file) for file in files]
    if len(names) == 1:
        return {rule.path: names[0]}
    return {
        rule.several: [
            {"name": _slug(f"{n}-{Path(each).stem}"), "path": each} for n, each in enumerate(names)
        ]
    }


def _import_path(file: object, name: object) -> str:
    if not name:
        raise NotSaid("the name of the function is missing")
    return f"{Path(_text(file)).stem}.{_text(name)}"


def _converted(rule: KeyRule, value: Any, values: Values) -> object:
    if rule.negate:
        return not value
    if rule.name:
        return _slug(_text(value))
    if rule.form is not None:
        return _formed(rule, value)
    numeric = (*rule.times, *rule.over, *rule.total, rule.into, rule.taken_from)
    if not any(numeric) and rule.least is None and not rule.whole:
        return value
    number = _calculated(rule, value, values)
    return int(number) if (number == int(number) and not isinstance(value, float)) or rule.whole else number


def _calculated(rule: KeyRule, value: Any, values: Values) -> float:
    number = _number(value)
    if rule.into:
        number = _number(values.get(rule.into, 0)) / number if number else 0.0
    if rule.taken_from:
        number = _number(values.get(rule.taken_from, 0)) - number
    for key in rule.times:
        number *= _number(values.get(key) or 1)
    for key in rule.over:
        number /= _number(values.get(key) or 1)
    if rule.total:
        number *= sum(_number(values.get(key) or 0) for key in rule.total)
    if rule.whole:
        number = math.ceil(number)
    return number if rule.least is None else max(rule.least, number)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise NotSaid(f"{_text(value)!r} is no number") from None


def _formed(rule: KeyRule, value: Any) -> str:
    text = _text(value)
    for pattern, form in (rule.form or {}).items():
        if match := re.fullmatch(pattern, text):
            return match.expand(form)
    return text


def _slug(text: str) -> str:
    return _NAME.sub("-", text).strip("-.") or "imported"


def _scalar(text: str) -> object:
    return yaml.safe_load(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(_text(each) for each in cast("list[Any]", value))
    return "null" if value is None else str(value)
