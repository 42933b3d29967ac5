"""What of a grammar an engine takes: its size, its nesting, its repetitions.

SGLang compiles a grammar while other requests run, and asks it before each token which ones may follow, in
the scheduler: a grammar for which xgrammar needs a second at each token stops all requests of the engine.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Parameters that constrain a completion to a grammar, which SGLang begins with the first new token."""

GRAMMAR_BYTES: Mapping[str, int] = {
    "json_schema": 65_536,
    "structural_tag": 65_536,
    "regex": 8_192,
    "ebnf": 8_192,
}
"""Largest grammars. xgrammar 0.2.7 compiles those of this size within seconds; the time grows with the square
of the size: 18 s for 16 KB of nested arrays, more than 40 s for a regex of 64 KB."""

DEEPEST_GRAMMAR = 64
"""Nesting of a grammar. A schema of 500 arrays in each other takes xgrammar 18 s, 1,000 choices in each other
minutes."""

MOST_REPETITIONS = 10_000
"""Product of the counted repetitions that are in each other. `((a*{0,1000})+){1000}` takes a second at each
token, and more at each further one."""

_SCHEMA_EXPRESSIONS = "pattern"
_TAG_GRAMMARS = {"regex": ("pattern", "regex"), "grammar": ("grammar", "ebnf")}
"""Structural tags hold other grammars: the field and the kind, by the type of the part."""


def grammar_violations(kind: str, grammar: object) -> Iterator[str]:
    """Yield what is wrong with a grammar. ``kind``: one of ``GRAMMARS``."""
    if not isinstance(grammar, str):
        yield f"expected a text, found {type(grammar).__name__}"
    elif (size := len(grammar.encode(errors="replace"))) > GRAMMAR_BYTES[kind]:
        yield f"expected at most {GRAMMAR_BYTES[kind]} bytes, found {size}"
    elif (depth := _depth(grammar)) > DEEPEST_GRAMMAR:
        yield f"expected at most {DEEPEST_GRAMMAR} levels of nesting, found {depth}"
    else:
        for inner_kind, text in _expressions(kind, grammar):
            yield from _repetition_violations(inner_kind, text)


def _expressions(kind: str, grammar: str) -> Iterator[tuple[str, str]]:
    """Yield the regular expressions and EBNF grammars of a grammar, with their kinds."""
    if kind in ("regex", "ebnf"):
        yield kind, grammar
        return
    try:
        yield from _inside(json.loads(grammar))
    except (ValueError, RecursionError):
        return  # SGLang says what is wrong with it


def _inside(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the expressions inside of a schema or a structural tag."""
    if isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _inside(item)
    elif isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        field, kind = _TAG_GRAMMARS.get(str(fields.get("type")), (_SCHEMA_EXPRESSIONS, "regex"))
        if isinstance(text := fields.get(field), str):
            yield kind, text
        if isinstance(patterns := fields.get("patternProperties"), dict):
            yield from (("regex", text) for text in cast("dict[str, Any]", patterns))
        for item in fields.values():
            yield from _inside(item)


def _repetition_violations(kind: str, text: str) -> Iterator[str]:
    rules = _rules(text) if kind == "ebnf" else {"": text}
    found: dict[str, float] = {}
    for name in rules:
        repeated = _repeated(name, rules, found, ())
        if repeated is None:
            yield (
                f"rule {name}: expected rules that do not refer to themselves, and at most {DEEPEST_GRAMMAR} "
                "that refer to each other: use json_schema for trees"
            )
            return
        if repeated > MOST_REPETITIONS:
            yield (
                f"expected repetitions in each other whose product is at most {MOST_REPETITIONS}, found "
                f"{repeated:.0f}"
            )
            return


_RULE = re.compile(r"^\s*([A-Za-z_][\w-]*)\s*::=", re.MULTILINE)
_PIECE = re.compile(
    r"""\\. | \[(?:\\.|[^\]\\])*\] | "(?:\\.|[^"\\])*" | \#.*$ | \{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\} | [()|]
    | ([A-Za-z_][\w-]*) | [^\s]""",
    re.VERBOSE | re.MULTILINE,
)
"""A character, class, text, comment, count, bracket or name of a rule. Quotes are texts in EBNF alone."""
_REGEX_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d*)(?:,(\d*))?\}|[()|]|()[\s\S]")


def _rules(text: str) -> dict[str, str]:
    parts = _RULE.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _repeated(
    name: str, rules: Mapping[str, str], found: dict[str, float], above: tuple[str, ...]
) -> float | None:
    """Return the largest product of counts in each other in a rule; None: it refers to itself, or too deep.

    ``found``: those of other rules. ``above``: rules that refer to this one.
    """
    if name in above or len(above) > DEEPEST_GRAMMAR:
        return None
    if name not in found:
        groups, last = [1.0], 1.0
        for piece in (_PIECE if name else _REGEX_PIECE).finditer(rules[name]):
            text, (least, most, word) = piece[0], piece.groups()
            if text == "(":
                groups.append(1.0)
                last = 1.0
            elif text == ")" and len(groups) > 1:
                last = groups.pop()
            elif text[0] == "{" and text != "{":
                last *= max(int(least or 1), int(most or 1), 1)
            elif word in rules and word:
                inner = _repeated(word, rules, found, (*above, name))
                if inner is None:
                    return None
                last = inner
            elif text not in "*+?":  # which repeat what is before them
                last = 1.0
            groups[-1] = max(groups[-1], last)
        found[name] = max(groups)
    return found[name]


def _depth(text: str) -> int:
    """Return the largest number of brackets that are open at one place. Those in texts count as well."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest
