"""Variables of a script: what bash makes of a word, and whether a test holds."""

import ast
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase, translate

from slipstream.rollout.compat.imports.shell_words import AND, LITERAL_DOLLAR, OR, UnreadableScript

EXPANSION = re.compile(r"\$\{(\w+)(?:\[[@*]\])?([^{}]*)\}|\$(\w+)")
"""A variable, and what bash changes in it: ``${NAME:-otherwise}``, ``${NAME##*/}``."""

_CALCULATION = re.compile(r"\$\(\(((?:[^()$]|\((?:[^()$]|\([^()$]*\))*\))*)\)\)")
"""Arithmetic of bash: ``$((1024 * 8))``."""

_DOCUMENT = re.compile(r"\$\(\s*cat\s*<<-?\s*['\"]?(\w+)['\"]?\n(.*)\n\s*\1\s*\)", re.DOTALL)
_CHANGE = re.compile(r"(:?[-=+]|%%?|##?|//?|,,|\^\^)(.*)", re.DOTALL)
_UNSET = re.compile("([\x01\x03])(.*?)\x02")
"""Stands for a variable without a value: ``$NAME`` with the first mark, ``${NAME}`` with the other."""

_MOST_CHARACTERS = 1 << 24
"""Limit on what all expansions of a script put in together: a value can double with each assignment."""
_DEEPEST = 50
"""Variables whose values name one another."""
_LARGEST = 1 << 63
"""Whole numbers of bash are smaller."""

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.Div: int.__floordiv__,
    ast.Mod: int.__mod__,
}
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
    "-lt": int.__lt__,
    "-le": int.__le__,
}


class ShellVariables:
    """Variables by name. ``environment``: those that a script may read without setting them.

    Methods raise UnreadableScript where values grow without end.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.arrays: dict[str, list[str]] = {}
        self.scalars: dict[str, str] = {}
        self.unknown: set[str] = set()
        """Variables whose value only a shell can tell."""
        self.used: set[str] = set()
        """Variables that words have named."""
        self._environment = environment
        self._left = _MOST_CHARACTERS

    def array(self, name: str) -> list[str]:
        """Return the words of an array."""
        self._spend(name, sum(map(len, self.arrays[name])))
        return self.arrays[name]

    def text(self, word: str, missing: list[str]) -> str:
        """Return a word with its variables, also those within defaults of others, and with its sums.

        ``missing`` gets the variables without a value, whose names stay.
        """
        word = _DOCUMENT.sub(lambda match: match[2], word)
        text, before = re.sub(r"\$#|\$\{#\}", "0", re.sub(r"\$\(pwd\)|`pwd`", "${PWD}", word)), ""
        rounds = 0
        while text != before:
            before, rounds = text, rounds + 1
            if rounds > _DEEPEST:
                raise UnreadableScript(f"{word}: its variables name one another without end")
            text = EXPANSION.sub(self._value, before)
            text = _CALCULATION.sub(self._calculated, text)
        missing += [name for _, name in _UNSET.findall(text)]
        return _UNSET.sub(_as_written, text)

    def holds(self, words: list[str], missing: list[str]) -> bool | None:
        """Return whether a test, ``[ a = b ]``, holds; None: only a shell can tell.

        A variable that is not set is empty, and ``missing`` gets it.
        """
        for operator in (OR, AND):
            if operator in words:
                at = words.index(operator)
                one, other = (
                    self.holds(words[:at], missing),
                    self.holds([words[0], *words[at + 1 :]], missing),
                )
                return either(one, other) if operator == OR else both(one, other)
        if words[0] == "!":
            return opposite(self.holds(words[1:], missing)) if len(words) > 1 else None
        if words[0] in ("true", "false"):
            return words[0] == "true"
        parts = [word for word in words[1:] if word not in ("]", "]]")]
        if words[0] not in ("[", "[[", "test") or "(" in words:
            return None
        if parts and parts[0] == "!":
            return opposite(self.holds([words[0], *parts[1:]], missing))
        unset: list[str] = []
        parts = [self.text(part, unset) for part in parts]
        missing += unset
        if self.unknown & set(unset) or any("$(" in part or "`" in part for part in parts):
            return None
        return _tested([re.sub(rf"{LITERAL_DOLLAR}\w+|{LITERAL_DOLLAR}{{\w+}}", "", part) for part in parts])

    def _value(self, match: re.Match[str]) -> str:
        name, change = match[1] or match[3], match[2] or ""
        unset = f"\x01{name}\x02" if match[3] else f"\x03{name}\x02"
        self.used.add(name)
        value = self.scalars[name] if name in self.scalars else self._environment.get(name) or None
        if value is None and name in self.arrays:
            value = " ".join(self.arrays[name])
        self._spend(name, len(value or ""))
        if change:
            changed = self._changed(name, value, change)
            return unset if changed is None else changed
        return unset if value is None else value

    def _spend(self, name: str, characters: int) -> None:
        self._left -= characters + 1
        if self._left < 0:
            raise UnreadableScript(
                f"{name}: the values of variables have more than {_MOST_CHARACTERS:,} characters in all, "
                "expected a script that starts a trainer"
            )

    def _changed(self, name: str, value: str | None, change: str) -> str | None:
        """Return a variable as ``${NAME...}`` changes it. None: it has no value, or not even bash could."""
        if not (match := _CHANGE.fullmatch(change)):
            return None
        kind, word = match[1], match[2].strip("\"'")
        is_absent = not value if kind.startswith(":") else value is None
        if kind.endswith("+"):
            return "" if is_absent else word
        if kind[-1] in "-=":
            if is_absent and kind.endswith("=") and name not in self.unknown:
                self.scalars[name] = word
            return word if is_absent else value
        return None if value is None else _trimmed(value, kind, word)

    def _calculated(self, match: re.Match[str]) -> str:
        """Return the result of a sum; the sum as it is where it holds more than whole numbers."""
        try:
            return str(self._number(ast.parse(match[1].strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    def _number(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name) if name in self.scalars:
                self.used.add(name)
                return int(self.scalars[name])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
                number = _OPERATORS[type(kind)](self._number(left), self._number(right))
                if abs(number) >= _LARGEST:
                    raise ValueError(f"{number:#x} is too large")
                return number
            case _:
                raise ValueError(ast.unparse(node))


def _as_written(match: re.Match[str]) -> str:
    return LITERAL_DOLLAR + (match[2] if match[1] == "\x01" else f"{{{match[2]}}}")


def opposite(value: bool | None) -> bool | None:
    """Return not ``value``, where None is: only a shell can tell."""
    return None if value is None else not value


def both(one: bool | None, other: bool | None) -> bool | None:
    """Return ``one and other``, where None is: only a shell can tell."""
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def either(one: bool | None, other: bool | None) -> bool | None:
    """Return ``one or other``, where None is: only a shell can tell."""
    return opposite(both(opposite(one), opposite(other)))


def _tested(parts: list[str]) -> bool | None:
    match parts:
        case []:
            return False
        case [text]:
            return bool(text)
        case ["-n" | "-z" as sign, text]:
            return bool(text) == (sign == "-n")
        case [text, "=" | "==", pattern]:
            return fnmatchcase(text, pattern)
        case [text, "!=", pattern]:
            return not fnmatchcase(text, pattern)
        case [one, sign, other] if sign in _COMPARED:
            try:
                return _COMPARED[sign](int(one or 0), int(other or 0))
            except ValueError:
                return None
        case _:
            return None


def _trimmed(value: str, kind: str, word: str) -> str:
    if kind in (",,", "^^"):
        return value.lower() if kind == ",," else value.upper()
    if kind.startswith("/"):
        pattern, _, instead = word.partition("/")
        found = re.compile(translate(pattern).removesuffix(r"\Z").removesuffix(r"\z"))
        return found.sub(lambda _: instead, value, count=len(kind) % 2)
    places = range(len(value) + 1)
    if kind.startswith("#"):
        cuts = [value[at:] for at in places if fnmatchcase(value[:at], word)]
    else:
        cuts = [value[:at] for at in reversed(places) if fnmatchcase(value[at:], word)]
    return (cuts[-1] if len(kind) == 2 else cuts[0]) if cuts else value
