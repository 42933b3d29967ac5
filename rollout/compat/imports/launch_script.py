"""Reads a launch script without running it: which flags its trainer would be started with.

A launch script is bash: arrays of flags, variables, files that it sources, and at its end one command that
starts the trainer: `train.py --lr 1e-6` for slime, `-m verl.trainer.main_ppo data.seed=1` for verl. What only
running it could tell, such as the output of a command or a variable of the environment, is reported and left
out.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

OF_SLIME = re.compile(r"(?:.*/)?(?:train|train_async)\.py")
"""The program that a launch script of slime starts."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_EXPANSION = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\}|\$(\w+)")
_CALCULATION = re.compile(r"\$\(\(((?:[^()$]|\((?:[^()$]|\([^()$]*\))*\))*)\)\)")
"""Arithmetic of bash: ``$((1024 * 8))``."""

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.Div: int.__floordiv__,
    ast.Mod: int.__mod__,
}
_LITERAL_DOLLAR = "\0"
"""Stands for a dollar sign between single quotes, which is not expanded."""

_SEPARATORS = "\n;&|"
_DEEPEST = 8
"""Files that source each other."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
"""Variables of the environment that no recipe or report may show."""


class UnreadableScript(ValueError):
    """The script starts no trainer, or cannot be read."""


@dataclass(frozen=True)
class Flag:
    """A flag of the trainer, without its dashes, and the words after it."""

    name: str
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """All words after the flag."""
        return " ".join(self.values)


class FlagValues(dict[str, Flag]):
    """The flags of a script by name. Of several with one name the last one counts, as in argparse."""

    def __init__(self, flags: Sequence[Flag]) -> None:
        super().__init__({flag.name: flag for flag in flags})

    def whole(self, name: str, default: int) -> int:
        """Return the value of a flag as a whole number; ``default`` if it is absent or none."""
        try:
            return int(self[name].text) if name in self else default
        except ValueError:
            return default

    def number(self, name: str, default: float) -> float:
        """Return the value of a flag as a number; ``default`` if it is absent or none."""
        try:
            return float(self[name].text) if name in self else default
        except ValueError:
            return default

    def value(self, name: str, default: str) -> str:
        """Return the value of a flag as it was written; ``default`` if it is absent."""
        return self[name].text if name in self else default


@dataclass
class LaunchScript:
    """The program that a script would start, with its flags."""

    trainer: str = ""
    """The program: `train.py`, `verl.trainer.main_ppo`."""
    flags: list[Flag] = field(default_factory=list[Flag])
    notes: list[str] = field(default_factory=list[str])
    """Messages about parts of the script that could not be read."""
    words: list[str] = field(default_factory=list[str])
    """What stands after the program."""


@dataclass(frozen=True)
class _Array:
    name: str
    appends: bool
    words: list[str]


def read_launch_script(
    path: Path, environment: Mapping[str, str] | None = None, starts: re.Pattern[str] = OF_SLIME
) -> LaunchScript:
    """Read a script and the files that it sources. Raises UnreadableScript and OSError.

    ``environment``: variables that the script may read without setting them. Secrets among them are not read.
    ``starts``: matches the program, as the script names it.
    """
    reader = _Reader(path, environment or {}, starts)
    reader.read(path, 0)
    if not reader.script.trainer:
        raise UnreadableScript(
            f"{path} starts no trainer, such as train.py or verl.trainer.main_ppo, expected a launch script"
        )
    return reader.script


class _Reader:
    def __init__(self, path: Path, environment: Mapping[str, str], starts: re.Pattern[str]) -> None:
        self.script = LaunchScript()
        self._starts = starts
        self._environment = {name: value for name, value in environment.items() if not _SECRET.search(name)}
        self._arrays: dict[str, list[str]] = {}
        self._scalars: dict[str, str] = {}
        self._folder = path.resolve().parent

    def read(self, path: Path, depth: int) -> None:
        command: list[str] = []
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UnreadableScript(
                f"{path}: this is not UTF-8 text: {error.reason}; save it as UTF-8"
            ) from None
        for token in _tokens(text):
            if isinstance(token, _Array):
                words = self._expanded(token.words)
                self._arrays[token.name] = [*self._arrays.get(token.name, ())] * token.appends + words
            elif token == "\n":
                self._run(command, depth)
                command = []
            else:
                command.append(token)
        self._run(command, depth)

    def _run(self, command: list[str], depth: int) -> None:
        words = [word for word in command if word not in ("export", "then", "else", "do")]
        while words and (assignment := _ASSIGNMENT.match(words[0])):
            self._assign(assignment[1], words.pop(0)[assignment.end() :])
        if not words:
            return
        if self.script.trainer and (array := _EXPANSION.fullmatch(words[0])) and array[1] in self._arrays:
            self._take(words)
            self.script.notes.append(
                f"the command of {self.script.trainer} ends before {words[0]}: a backslash is missing in the "
                "script, and what follows is taken as its flags"
            )
            return
        if words[0] in ("source", ".") and len(words) > 1:
            self._source(words[1], depth)
            return
        for position, word in enumerate(words):
            if self._starts.fullmatch(word):
                self.script.trainer, self.script.words = word.rpartition("/")[2], []
                self._take(words[position + 1 :])
                return

    def _take(self, words: list[str]) -> None:
        self.script.words += self._expanded(words)
        self.script.flags = list(_flags(self.script.words))

    def _assign(self, name: str, value: str) -> None:
        words = self._expanded([value], quiet=True)
        self._scalars.pop(name, None)
        if words:
            self._scalars[name] = " ".join(words)

    def _source(self, word: str, depth: int) -> None:
        name = word.rpartition("/")[2]
        folders = (self._folder / "models", self._folder, self._folder.parent / "scripts" / "models")
        folders += (self._folder.parents[min(1, len(self._folder.parents) - 1)] / "scripts" / "models",)
        places = [folder / name for folder in folders]
        place = next((place for place in places if place.is_file()), None)
        if place is None:
            self.script.notes.append(f"{word} is sourced, but is not at {places[0]}: its flags are missing")
        elif depth >= _DEEPEST:
            self.script.notes.append(f"{word} is sourced too deeply")
        else:
            self.read(place, depth + 1)

    def _expanded(self, words: list[str], quiet: bool = False) -> list[str]:
        """Return words with their variables. Where the script does not set one that is a part of a word, the
        word keeps its name; a word that cannot be expanded is left out. Both are noted, unless ``quiet``.
        """
        expanded: list[str] = []
        for word in words:
            whole = _EXPANSION.fullmatch(word)
            if whole and whole[1] in self._arrays:
                expanded += self._arrays[whole[1]]
                continue
            missing: list[str] = []
            text = self._text(word, missing)
            is_unknown = "$(" in text or "`" in text
            if (missing or is_unknown) and not quiet:
                self._note_missing(word, missing)
            if is_unknown or (missing and (quiet or whole)):
                continue
            pieces = text.split()
            if whole and not quiet and all("=" in piece for piece in pieces):
                expanded += pieces  # a text of several overrides, without quotes
            elif text or not whole:
                expanded.append(text.replace(_LITERAL_DOLLAR, "$"))
        return expanded

    def _text(self, word: str, missing: list[str]) -> str:
        """Return a word with its variables, also those within defaults of others, and with its sums."""
        text, before = word, ""
        while text != before:
            before = text
            text = _EXPANSION.sub(partial(self._value, missing=missing), before)
            text = _CALCULATION.sub(self._calculated, text)
        return text

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
            case ast.Name(id=name) if name in self._scalars:
                return int(self._scalars[name])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
                return _OPERATORS[type(kind)](self._number(left), self._number(right))
            case _:
                raise ValueError(ast.unparse(node))

    def _value(self, match: re.Match[str], missing: list[str]) -> str:
        """Return the value of a variable, or its name where the script does not set it."""
        name = match[1] or match[3]
        if name in self._scalars:
            return self._scalars[name]
        if value := self._environment.get(name):
            return value
        if match[2] is not None:
            return match[2].strip('"')
        missing.append(name)
        return match[0].replace("$", _LITERAL_DOLLAR)

    def _note_missing(self, word: str, missing: list[str]) -> None:
        word = word.replace(_LITERAL_DOLLAR, "$")
        if missing:
            self.script.notes.append(f"{word}: the script does not set {', '.join(missing)}")
        else:
            self.script.notes.append(f"{word} is left out: only a shell can tell its value")


def _flags(words: list[str]) -> Iterator[Flag]:
    name, values = "", list[str]()
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            if name:
                yield Flag(name, tuple(values))
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
        elif name:
            values.append(word)
    if name:
        yield Flag(name, tuple(values))


def _tokens(text: str) -> Iterator[str | _Array]:
    """Yield the words of a script without their quotes, "\\n" between commands, and arrays as a whole."""
    lexer = _Lexer(text)
    while (token := lexer.next()) is not None:
        assignment = _ASSIGNMENT.fullmatch(token)
        if assignment and lexer.skip("("):
            words: list[str] = []
            while (word := lexer.next()) not in (None, ")"):
                words += [word] if word and word != "\n" else []
            yield _Array(assignment[1], bool(assignment[2]), words)
        elif token not in ("(", ")", "{", "}"):
            yield token


class _Lexer:
    """Splits bash into words."""

    def __init__(self, text: str) -> None:
        self._text = re.sub(r"\\\r?\n", " ", text)
        self._at = 0

    def skip(self, character: str) -> bool:
        """Skip ``character`` if it comes next. Return whether it does."""
        is_next = self._text.startswith(character, self._at)
        self._at += is_next
        return is_next

    def next(self) -> str | None:
        """Return the next word, a bracket, or "\\n" between commands; None at the end."""
        while self._at < len(self._text) and self._text[self._at] in " \t\r":
            self._at += 1
        if self._at >= len(self._text):
            return None
        character = self._text[self._at]
        if character == "#":
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
            return self.next()
        if self._text.startswith("<<", self._at) and not self._text.startswith("<<<", self._at):
            self._skip_document()
            return self.next()
        if character in _SEPARATORS or character in "()":
            self._at += 1
            return "\n" if character in _SEPARATORS else character
        return self._word()

    def _word(self) -> str:
        parts: list[str] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in " \t\r()" or character in _SEPARATORS:
                break
            if character in "'\"":
                parts.append(self._quoted(character))
            elif self._text.startswith("$(", self._at):
                parts.append(self._substitution())
            elif character == "\\":
                parts.append(self._text[self._at + 1 : self._at + 2])
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
        return content.replace("$", _LITERAL_DOLLAR) if quote == "'" else content

    def _substitution(self) -> str:
        start, depth = self._at, 0
        self._at += 1
        while self._at < len(self._text):
            depth += (self._text[self._at] == "(") - (self._text[self._at] == ")")
            self._at += 1
            if depth == 0:
                break
        return self._text[start : self._at]

    def _skip_document(self) -> None:
        """Skip a here-document, from its operator to its last line."""
        match = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?").match(self._text, self._at)
        if match is None:
            self._at += 2
            return
        end = re.compile(rf"\n[ \t]*{match[1]}[ \t]*(?=\n|$|\))").search(self._text, match.end())
        self._at = end.end() if end else len(self._text)
