"""Finds the answer in a response, in the usual forms and in a time that is linear in its length.

all                  the whole response
boxed                the content of the last \\boxed{...} or \\fbox{...} whose braces are balanced
last_line            the last line that is not blank
{after: MARKER}      what follows the last MARKER
{tag: NAME}          the content of the last <NAME>...</NAME>
"""

import re
from collections.abc import Callable, Mapping
from typing import cast

FindAnswer = Callable[[str], str | None]
"""Returns the answer in a response; None: the response has none."""

FORMS = "expected `all`, `boxed`, `last_line`, `{after: MARKER}` or `{tag: NAME}`"

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def answer_finder(form: object) -> FindAnswer:
    """Return the function for one of the forms above, as a recipe spells it. Raises ValueError."""
    if isinstance(form, str) and form in _PLAIN:
        return _PLAIN[form]
    if isinstance(form, Mapping):
        match dict(cast("Mapping[object, object]", form)):
            case {"after": str(marker), **rest} if marker and not rest:
                return lambda response: _after(marker, response)
            case {"tag": str(name), **rest} if re.fullmatch(r"[\w-]+", name) and not rest:
                return lambda response: _tagged(name, response)
            case _:
                pass
    raise ValueError(f"answer: found {form!r}, {FORMS}")


def last_boxed(response: str) -> str | None:
    """Return the content of the last ``\\boxed{...}`` whose braces are balanced; None: there is none.

    ``\\{`` and ``\\}`` are no braces. A box within a box belongs to the outer one.
    """
    first = _BOX.search(response)
    if first is None:
        return None
    starts = {match.end() for match in _BOX.finditer(response, first.start())}
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(response, first.end() - 1):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened and (start := opened.pop()) in starts:
            last = (start, brace.start())
    return None if last is None else response[slice(*last)].strip()


def _after(marker: str, response: str) -> str | None:
    _, separator, answer = response.rpartition(marker)
    return answer.strip() if separator else None


def _tagged(name: str, response: str) -> str | None:
    end = response.rfind(f"</{name}>")
    opening = f"<{name}>"
    start = response.rfind(opening, 0, max(end, 0))
    return None if end < 0 or start < 0 else response[start + len(opening) : end].strip()


_PLAIN: dict[str, FindAnswer] = {
    "all": str.strip,
    "boxed": last_boxed,
    "last_line": lambda response: next(
        (line.strip() for line in reversed(response.splitlines()) if line.strip()), None
    ),
}
