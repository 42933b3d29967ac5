"""Splits bash into words, arrays, and the operators between commands."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
"""The start of an assignment: ``name=`` or ``name+=``."""

LITERAL_DOLLAR = "\0"
"""Stands for a dollar sign that is not expanded, such as one between single quotes."""

END, AND, OR, CASE_END = "\n", "\n&&", "\n||", "\n;;"
"""Tokens between commands. A line end, ``;``, ``|`` and ``&`` each become END."""

DOCUMENT = "\n<"
"""Stands for a here-document. Its text follows in the same token."""

REDIRECTION = "\n>"
"""Stands for ``> file``, ``2>&1`` and the like."""

BRACKETS = ("(", ")", "{", "}")

_SEPARATORS = "\n;&|"
_REDIRECTS = re.compile(r"\d*(?:&?>>?|<)(?![<(])(&[\d-]+)?[ \t]*")
_OPERATORS = {"&&": AND, "||": OR, ";;": CASE_END}


class UnreadableScript(ValueError):
    """The script starts no trainer, or cannot be read."""


@dataclass(frozen=True)
class Array:
    """``name=(words)`` or ``name+=(words)``."""

    name: str
    appends: bool
    words: list[str]


def tokens(text: str) -> Iterator[str | Array]:
    """Yield the words of a script without their quotes, operators between commands, and whole arrays."""
    lexer = _Lexer(text)
    while (token := lexer.next()) is not None:
        assignment = ASSIGNMENT.fullmatch(token)
        if assignment and lexer.skip("("):
            words: list[str] = []
            while (word := lexer.next()) not in (None, ")"):
                words += [word] if word and not word.startswith("\n") else []
            yield Array(assignment[1], bool(assignment[2]), words)
        else:
            yield token


class _Lexer:
    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0

    def skip(self, characters: str) -> bool:
        """Skip ``characters`` if they come next. Return whether they do."""
        is_next = self._text.startswith(characters, self._at)
        self._at += is_next * len(characters)
        return is_next

    def next(self) -> str | None:
        """Return the next word, a bracket, or an operator; None at the end."""
        while self.skip(" ") or self.skip("\t") or self.skip("\\\n"):
            pass
        if self._at >= len(self._text):
            return None
        character = self._text[self._at]
        if character == "#":  # a backslash at its end does not continue a comment
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
            return self.next()
        if self._text.startswith("<<", self._at) and not self._text.startswith("<<<", self._at):
            return self._document()
        if redirects := _REDIRECTS.match(self._text, self._at):
            self._at = redirects.end()
            if not redirects[1]:
                self._word()
            return REDIRECTION
        if operator := _OPERATORS.get(self._text[self._at : self._at + 2]):
            self._at += 2
            return operator
        if character in _SEPARATORS or character in "()":
            self._at += 1
            return END if character in _SEPARATORS else character
        return self._word()

    def _word(self) -> str:
        parts: list[str] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in " \t()" or character in _SEPARATORS:
                break
            if self.skip("\\\n"):
                continue
            if character in "'\"":
                parts.append(self._quoted(character))
            elif self._text.startswith("$(", self._at):
                parts.append(self._substitution())
            elif character == "\\":
                parts.append(self._text[self._at + 1 : self._at + 2].replace("$", LITERAL_DOLLAR))
                self._at += 2
            else:
                parts.append(character)
                self._at += 1
        return "".join(parts)

    def _quoted(self, quote: str) -> str:
        end = self._at + 1
        while end < len(self._text) and self._text[end] != quote:
            end += 2 if quote == '"' and self._text[end] == "\\" else 1
        content = self._text[self._at + 1 : end]
        self._at = end + 1
        if quote == "'":
            return content.replace("$", LITERAL_DOLLAR)
        return re.sub(r"\\([$`\"\\\n])", _unescaped, content)

    def _substitution(self) -> str:
        start, depth = self._at, 0
        self._at += 1
        while self._at < len(self._text):
            depth += (self._text[self._at] == "(") - (self._text[self._at] == ")")
            self._at += 1
            if depth == 0:
                break
        return self._text[start : self._at]

    def _document(self) -> str:
        """Return a here-document, from its operator to its last line."""
        match = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?").match(self._text, self._at)
        if match is None:
            self._at += 2
            return END
        end = re.compile(rf"\n[ \t]*{match[1]}[ \t]*(?=\n|$|\))").search(self._text, match.end())
        text = self._text[match.end() : end.start() if end else None].replace("\\$", "$")
        self._at = end.end() if end else len(self._text)
        return DOCUMENT + text


def _unescaped(match: re.Match[str]) -> str:
    return {"\n": "", "$": LITERAL_DOLLAR}.get(match[1], match[1])
