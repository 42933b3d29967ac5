"""Reads a launch script without running it: which flags its trainer would be started with.

A launch script is bash: arrays of flags, variables, files that it sources, and at its end one command that
starts the trainer: `train.py --lr 1e-6` for slime, `-m verl.trainer.main_ppo data.seed=1` for verl. What only
running it could tell, such as the output of a command or a variable of the environment, is reported and left
out.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.rollout.compat.imports.shell_values import EXPANSION, ShellVariables, both, either, opposite
from slipstream.rollout.compat.imports.shell_words import (
    AND,
    ASSIGNMENT,
    BRACKETS,
    CASE_END,
    DOCUMENT,
    END,
    LITERAL_DOLLAR,
    OR,
    REDIRECTION,
    Array,
    UnreadableScript,
    tokens,
)

OF_SLIME = re.compile(r"(?:.*/)?(?:train|train_async)\.py")
"""The program that a launch script of slime starts."""

_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*][^{}]*\}")
"""The arguments of the script, of which an import knows none."""

_GOES_ON = re.compile(r"--[A-Za-z]|[+~]*[A-Za-z_]\w*(?:\.[\w-]+)+=")
_SHELLS = re.compile(r"(?:.*/)?(?:bash|sh)")

_DEEPEST = 8
"""Files that source each other."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
"""Variables of the environment that no recipe or report may show."""


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


def read_launch_script(
    path: Path, environment: Mapping[str, str] | None = None, starts: re.Pattern[str] = OF_SLIME
) -> LaunchScript:
    """Read a script and the files that it sources. Raises UnreadableScript and OSError.

    ``environment``: variables that the script may read without setting them. Secrets among them are not read.
    ``starts``: matches the program, as the script names it.
    """
    reader = _Reader(path, environment or {}, starts)
    reader.read(path, 0)
    reader.call_what_is_left()
    if not reader.script.trainer:
        raise UnreadableScript(
            f"{path} starts no trainer, such as train.py or verl.trainer.main_ppo, expected a launch script"
        )
    return reader.script


@dataclass
class _Choice:
    """An ``if``, ``case`` or loop whose end has not been read. None: only a shell can tell."""

    around: bool | None
    """Whether the shell reaches the statement."""
    reads: bool | None = False
    """Whether the shell runs the branch that is being read."""
    has_chosen: bool | None = False
    """Whether an earlier branch was taken."""
    asks: bool = True
    """The condition, or the pattern of a ``case``, comes next."""
    value: bool | None = True
    operator: str = AND
    missing: list[str] = field(default_factory=list[str])
    words: list[str] = field(default_factory=list[str])
    """The condition, or the patterns, as they are written."""
    subject: str | None = None
    """The word that a ``case`` compares."""

    def enter(self, holds: bool | None) -> None:
        """Come to the commands of a branch."""
        self.reads = both(self.around, both(holds, opposite(self.has_chosen)))
        self.has_chosen = either(self.has_chosen, holds)
        self.asks = False

    def ask(self) -> None:
        """Come to the next condition."""
        self.asks, self.value, self.operator, self.words = True, True, AND, []

    def take(self, words: list[str], holds: bool | None, operator: str) -> None:
        """Take one test of the condition, and the operator after it."""
        self.value = (both if self.operator == AND else either)(self.value, holds)
        self.operator = operator
        self.words += words


class _Reader:
    def __init__(self, path: Path, environment: Mapping[str, str], starts: re.Pattern[str]) -> None:
        self.script = LaunchScript()
        self._starts = starts
        self._variables = ShellVariables(
            {name: value for name, value in environment.items() if not _SECRET.search(name)}
        )
        self._folder = path.resolve().parent
        self._choices: list[_Choice] = []
        self._chain = _Choice(True, True)
        self._documents: list[str] = []
        self._skipped: list[list[str]] = []
        self._functions: dict[str, list[str | Array]] = {}
        self._doubts: dict[str, str] = {}
        """By variable: why its value may be another one."""

    def read(self, path: Path, depth: int) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UnreadableScript(
                f"{path}: this is not UTF-8 text: {error.reason}; save it as UTF-8"
            ) from None
        self._execute(list(tokens(text)), depth)

    def call_what_is_left(self) -> None:
        """If no trainer was found, read what may be run: skipped commands, functions, here-documents."""
        if not self.script.trainer and (words := next(filter(self._start, self._skipped), None)):
            self.script.notes.append(f"the script does not come to {' '.join(words[:4])} as it stands")
        while not self.script.trainer and self._functions:
            self._execute(self._functions.pop(next(iter(self._functions))), _DEEPEST)
        while not self.script.trainer and self._documents:
            self._execute(list(tokens(self._documents.pop(0))), _DEEPEST)

    # ---- control flow

    def _execute(self, script: list[str | Array], depth: int) -> None:
        command, place = list[str](), 0
        while place < len(script):
            token = script[place]
            place += 1
            if isinstance(token, Array):
                while command and self._is_keyword(command):
                    continue
                self._set_array(token)
            elif token == "(" and script[place : place + 1] == [")"] and len(command) == 1:
                place = self._define(command.pop(), script, place)
            elif token == "{" and command[:1] == ["function"]:
                place = self._define(command.pop(), script, place - 1)
                command = []
            elif token == ")" and self._choices and self._choices[-1].asks and command:
                self._pattern(command)
                command = []
            elif token in (AND, OR) and "[[" in command and "]]" not in command:
                command.append(token)
            elif token in (END, AND, OR, CASE_END):
                self._command(command, token, depth)
                command = []
            elif token in BRACKETS:
                command += [token] * (script[place : place + 1] == [token])  # of (( arithmetic ))
            elif token.startswith(DOCUMENT):
                self._documents.append(token.removeprefix(DOCUMENT))
            elif token == REDIRECTION:
                command += [token] * (command[:1] == ["[["])  # a comparison
            else:
                command.append(token)
                if token == "in" and command[0] == "case":
                    self._command(command, END, depth)
                    command = []
        self._command(command, END, depth)

    def _define(self, name: str, script: list[str | Array], place: int) -> int:
        """Keep the commands of a function. Return the place after them."""
        start = next((at for at in range(place, len(script)) if script[at] == "{"), len(script))
        end, depth = start, 0
        for end in range(start, len(script)):
            depth += (script[end] == "{") - (script[end] == "}")
            if depth == 0:
                break
        self._functions[name] = script[start + 1 : end]
        return end + 1

    def _reads(self) -> bool | None:
        """Return whether the shell comes to the next command."""
        choice = self._choices[-1] if self._choices else None
        return choice.around if choice and choice.asks else choice.reads if choice else True

    def _command(self, words: list[str], end: str, depth: int) -> None:
        while words and self._is_keyword(words):
            continue
        choice = self._choices[-1] if self._choices else None
        if choice and choice.asks and words:
            if choice.subject is None:
                choice.take(words, self._variables.holds(words, choice.missing), end)
            else:
                choice.words += words  # a | b
        if words and not (choice and choice.asks and choice.subject is not None):
            self._link(words, end, depth)
        elif end in (END, CASE_END):
            self._chain = _Choice(True, True)
        if end == CASE_END and choice and choice.subject is not None:
            choice.ask()

    def _is_keyword(self, words: list[str]) -> bool:
        """Take the first word if it opens, divides or closes an ``if``, ``case`` or loop."""
        choice = self._choices[-1] if self._choices else None
        match words[0]:
            case "if" | "while" | "until":
                self._choices.append(_Choice(self._reads()))
            case "for" | "select" | "case":
                self._open(words)
                words[1:] = []
            case "then" | "do" if choice:
                choice.enter(choice.value)
            case "else" if choice:
                choice.enter(True)
            case "elif" if choice:
                choice.ask()
            case "fi" | "done" | "esac" if choice:
                self._choices.pop()
                words[1:] = []
            case "export" | "local" | "declare" | "readonly" | "typeset":
                while len(words) > 1 and words[1].startswith("-"):
                    words.pop(1)
            case _:
                return False
        words.pop(0)
        return True

    def _open(self, words: list[str]) -> None:
        choice = _Choice(self._reads(), words=words)
        if words[0] == "case":
            missing: list[str] = []
            choice.subject = self._variables.text(words[1], missing) if len(words) > 1 else ""
            choice.missing = missing
        elif len(words) > 3:
            self._assign(words[1], "", words[3])
            self._doubts[words[1]] = f"{' '.join(words)}: only the first is imported"
        self._choices.append(choice)

    def _pattern(self, patterns: list[str]) -> None:
        choice = self._choices[-1]
        wanted, choice.words = [*choice.words, *patterns], []
        is_known = not choice.missing and "$(" not in (choice.subject or "")
        tests = [self._variables.holds(["[", choice.subject or "", "=", each], []) for each in wanted]
        choice.enter(any(tests) if is_known else None)
        choice.words = [f"case {' '.join(choice.missing)} in", *wanted]

    def _link(self, words: list[str], end: str, depth: int) -> None:
        """Run a command if the one before it, with ``&&`` or ``||`` between them, lets it run."""
        chain, missing = self._chain, list[str]()
        is_test = words[0] in ("[", "[[", "test", "!")
        if is_test or chain.reads is False:
            value = self._variables.holds(words, missing) if is_test else chain.value
            self._note_skipped(words)
        else:
            self._run(words, depth)
            value = None if end == OR else True
        if chain.reads is False:
            value = chain.value
        runs = {AND: value, OR: opposite(value)}.get(end, True)
        self._chain = _Choice(True, runs, value=value, missing=missing, words=words)

    def _now(self) -> bool | None:
        return both(self._reads(), self._chain.reads)

    def _note_skipped(self, words: list[str]) -> None:
        if assignment := ASSIGNMENT.match(words[0]):
            self._doubt(assignment[1])

    def _doubt(self, name: str) -> None:
        """Remember that only a shell can tell whether the script sets a variable here."""
        choice = next((each for each in (*self._choices, self._chain) if each.reads is not True), None)
        if choice and (choice.reads is None or choice.missing):
            decides = " ".join(word.strip() for word in choice.words).replace(LITERAL_DOLLAR, "$")
            unset = ", ".join(dict.fromkeys(choice.missing))
            why = "only a shell can tell" if choice.reads is None else f"nothing sets {unset}"
            self._doubts[name] = f"{name} depends on {decides}: {why}"

    # ---- commands

    def _run(self, words: list[str], depth: int) -> None:
        while words and (assignment := ASSIGNMENT.match(words[0])):
            self._assign(assignment[1], assignment[2], words.pop(0)[assignment.end() :])
        if not words or self._now() is False:
            self._skipped += [words] * bool(words)
            return
        if self.script.trainer and self._goes_on(words[0]):
            self._take(words)
            self.script.notes.append(
                f"the command of {self.script.trainer} ends before {words[0]}: a backslash is missing in the "
                "script, and what follows is taken as its flags"
            )
        elif words[0] in ("source", ".") and len(words) > 1:
            self._source(words[1], depth)
        elif words[0] in self._functions and depth < _DEEPEST:
            self._call(words, depth)
        elif not self._start(words) and depth < _DEEPEST and (text := self._inner(words)):
            self._execute(list(tokens(text)), depth + 1)

    def _goes_on(self, word: str) -> bool:
        whole = EXPANSION.fullmatch(word)
        return bool(whole and whole[1] in self._variables.arrays) or bool(_GOES_ON.match(word))

    def _start(self, words: list[str]) -> bool:
        """Take the flags of the trainer if a command starts it. Return whether it does."""
        for position, word in enumerate(words):
            name = self._variables.text(word, []) if "$" in word else word
            if self._starts.fullmatch(name):
                if self.script.trainer:
                    self.script.notes.append("the script starts a trainer several times: the last one counts")
                self.script.trainer, self.script.words = name.rpartition("/")[2], []
                self._take(words[position + 1 :])
                return True
        return False

    def _inner(self, words: list[str]) -> str:
        """Return the script that a command runs: ``bash -c TEXT``, ``eval TEXT``, or ``$COMMAND``."""
        for place, word in enumerate(words):
            if _SHELLS.fullmatch(word) and any(option.endswith("c") for option in words[place + 1 : -1]):
                return self._variables.text(words[-1].replace(LITERAL_DOLLAR, "$"), [])
        if words[0] != "eval" and not EXPANSION.fullmatch(words[0]):
            return ""
        text = self._variables.text(" ".join(words[words[0] == "eval" :]), [])
        return text.replace(LITERAL_DOLLAR, "$") if text != words[0] else ""

    def _call(self, words: list[str], depth: int) -> None:
        """Run a function of the script with its arguments."""
        arguments = {str(place): word for place, word in enumerate(self._expanded(words[1:]), 1)}
        before = {name: self._variables.scalars.get(name) for name in arguments}
        self._variables.scalars |= arguments
        self._execute(self._functions[words[0]], depth + 1)
        for name, value in before.items():
            self._variables.scalars.pop(name, None)
            if value is not None:
                self._variables.scalars[name] = value

    def _take(self, words: list[str]) -> None:
        self._variables.used.clear()
        self.script.words += self._expanded(words)
        self.script.flags = list(_flags(self.script.words))
        self.script.notes += [note for name, note in self._doubts.items() if name in self._variables.used]

    def _set_array(self, array: Array) -> None:
        now, name, arrays = self._now(), array.name, self._variables.arrays
        self._doubt(name)
        if now is not False:
            words = self._expanded(array.words)
            arrays[name] = [*arrays.get(name, ())] * array.appends + words

    def _assign(self, name: str, appends: str, value: str) -> None:
        now, variables = self._now(), self._variables
        self._doubt(name)
        if now is False:
            return
        variables.used.clear()
        words, before = self._expanded([value], quiet=True), variables.scalars.get(name, "")
        if words:
            variables.scalars[name] = before * bool(appends) + " ".join(words)
            variables.unknown.discard(name)
        elif now:
            variables.scalars.pop(name, None)
            if not EXPANSION.fullmatch(value) or variables.unknown & variables.used:
                variables.unknown.add(name)
        if now and (doubt := next((self._doubts[each] for each in variables.used & self._doubts.keys()), "")):
            self._doubts[name] = doubt

    def _source(self, word: str, depth: int) -> None:
        name = word.rpartition("/")[2]
        below = re.sub(r"^(?:\$\(.*\)|\$\w+|\$\{\w+[^{}]*\})/", "", word)
        folders = (self._folder / "models", self._folder, self._folder.parent / "scripts" / "models")
        folders += (self._folder.parents[min(1, len(self._folder.parents) - 1)] / "scripts" / "models",)
        places = [folder / name for folder in folders]
        place = next((place for place in (self._folder / below, *places) if place.is_file()), None)
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
            whole = EXPANSION.fullmatch(word)
            if whole and whole[1] in self._variables.arrays and not whole[2]:
                self._variables.used.add(whole[1])
                expanded += self._variables.array(whole[1])
                continue
            if _ARGUMENTS.fullmatch(word):
                continue
            missing: list[str] = []
            text = self._variables.text(word, missing)
            is_unknown = "$(" in text or "`" in text or "${" in text
            if (missing or is_unknown) and not quiet:
                self._note_missing(word, missing)
            if is_unknown or (missing and (quiet or whole)):
                continue
            pieces = text.split()
            if whole and not quiet and (text.startswith("--") or all("=" in piece for piece in pieces)):
                expanded += pieces  # a text of several flags or overrides, without quotes
            elif text or not whole:
                expanded.append(text.replace(LITERAL_DOLLAR, "$"))
        return expanded

    def _note_missing(self, word: str, missing: list[str]) -> None:
        word = word.replace(LITERAL_DOLLAR, "$")
        missing = [name for name in missing if name not in self._doubts] or missing
        if missing and self._doubts.keys() >= set(missing):
            return  # noted with the flags
        if unset := [name for name in missing if name not in self._variables.unknown]:
            self.script.notes.append(f"{word}: the script does not set {', '.join(unset)}")
        else:
            what = ", ".join(missing) or "its value"
            self.script.notes.append(f"{word}: only a shell can tell {what}")


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
