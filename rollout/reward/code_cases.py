"""The program in a response, and the cases that it is tested with, as a prompt set spells them. Pure."""

import ast
import builtins
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import cast

from slipstream.rollout.reward.code_calls import MODULES
from slipstream.rollout.tokens.trajectory import Prompt

FORMS = (
    "expected a list of {input: ..., output: ...}, {inputs: [...], outputs: [...]}, the same with the name "
    "of a function (fn_name), or a list of assert statements, as a value or as JSON"
)

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})\s*(\S*)(.*)")
_PYTHON = re.compile(r"(?:python|py)[\d.]*|\{\.python\}", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)


@dataclass(frozen=True)
class StdioCase:
    """The standard input of a program, and the output that it must print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallCase:
    """A function of the program, its arguments, and what it must return. All are values of JSON."""

    function: str
    arguments: list[object]
    returns: tuple[object, ...]
    """Values of which it must return one."""

    def accepts(self, returned: object) -> bool:
        """True for a value that is right, as ``code_calls.encoded`` writes it. Raises ValueError, TypeError.

        A tuple counts as a list, because JSON has no tuples.
        """
        return any(_as_json(returned) == each for each in self.returns)


@dataclass(frozen=True)
class Uses:
    """Names that a program must define."""

    names: tuple[str, ...]
    """In the order of the statements."""
    own: tuple[str, ...] = ()
    """Those of them that Python has as well, such as ``sum``: the statements test the program's function."""


@dataclass(frozen=True)
class AssertCase:
    """Statements that must run without an error, and what they use of the program."""

    statements: str
    uses: Uses


Case = StdioCase | CallCase | AssertCase


def program_in(response: str, names: Iterable[str] = ()) -> str | None:
    """Return the program in a response: a fenced block that is closed. None: there is none.

    Blocks that say that they are Python go before others, and others before what is no program, such as an
    output. Of several the last counts. Where ``names`` are expected of a program, it is the last block that
    defines them all, if there is one: a block that uses them may follow.
    """
    blocks = list(_blocks(response))
    python = [text for language, text in blocks if _PYTHON.fullmatch(language)]
    unnamed = [text for language, text in blocks if not language]
    candidates = python or unnamed or [text for _, text in blocks]
    if not candidates:
        return None
    last = candidates[-1]
    wanted = frozenset(names)
    considered = candidates[-MOST_BLOCKS:]
    if wanted:
        return next((text for text in reversed(considered) if wanted <= _defined(text)), last)
    return next((text for text in reversed(considered) if python or _is_program(text)), last)


MOST_BLOCKS = 16
"""Blocks of a response that are considered, from the last."""


def _parsed(text: str) -> list[ast.stmt]:
    """Return the statements of a program; none if it is no Python."""
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _is_program(text: str) -> bool:
    """True for Python that does more than naming values, as an output does."""
    plain = (ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp)
    return any(not (isinstance(each, ast.Expr) and isinstance(each.value, plain)) for each in _parsed(text))


def _defined(text: str) -> frozenset[str]:
    """Return the names that a program defines, with the methods of its class ``Solution``."""
    found: set[str] = set()
    for statement in _parsed(text):
        for each in ast.walk(statement):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(each.name)
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                found.add(each.id)
            elif isinstance(each, ast.alias):
                found.add(each.asname or each.name)
    return frozenset(found)


def _blocks(response: str) -> Iterator[tuple[str, str]]:
    """Return the language and the content of each fenced block that is closed.

    A block ends with a line of as many of its fence's characters or more, as CommonMark says (4.5).
    """
    fence, start, language = "", 0, ""
    lines = response.splitlines()
    for number, line in enumerate(lines):
        mark = _FENCE.fullmatch(line)
        if mark is None:
            continue
        if not fence:
            fence, start, language = mark[1], number + 1, mark[2]
        elif mark[1].startswith(fence) and not (mark[2] or mark[3].strip()):
            yield language, "\n".join(lines[start:number]) + "\n"
            fence = ""


def cases_of(prompt: Prompt, column: str) -> list[Case]:
    """Return the cases in the label, or in another column of the prompt. Raises ValueError."""
    value: object = prompt.label if column == "label" else prompt.metadata.get(column)
    where = f"{prompt.reference}: {column}"
    if isinstance(value, str):
        value = _from_json(value)
    try:
        cases = list(_cases(value, _function(prompt.metadata)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {FORMS}") from None
    if not cases:
        raise ValueError(f"{where} has no cases; {FORMS}")
    return cases


def _from_json(text: str) -> object:
    """Return the value of a JSON text. A JSON string, or a text that is no JSON, becomes a list of one."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    return [value] if isinstance(value, str) else value


def _cases(value: object, function: str | None) -> Iterator[Case]:
    """``function``: the name that the row has beside its cases."""
    if isinstance(value, Mapping):
        columns = cast("Mapping[str, object]", value)
        function = _function(columns) or function
        inputs, outputs = columns.get("inputs"), columns.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise ValueError("found an object without the lists `inputs` and `outputs`")
        ins, outs = cast("list[object]", inputs), cast("list[object]", outputs)
        if len(ins) != len(outs):
            raise ValueError(f"found {len(ins)} inputs and {len(outs)} outputs")
        is_function = _is_function(columns, _function(columns))
        for stdin, stdout in zip(ins, outs, strict=True):
            yield _call(function, stdin, stdout) if is_function else StdioCase(_text(stdin), _text(stdout))
    elif isinstance(value, list | tuple):
        for each in cast("Sequence[object]", value):
            yield _case(each, function)
    else:
        raise ValueError(f"found {type(value).__name__}")


def _case(value: object, function: str | None) -> Case:
    kind = type(value).__name__
    if isinstance(value, str):
        return AssertCase(value, uses_of(value))
    if isinstance(value, Mapping):
        columns = cast("Mapping[str, object]", value)
        if columns.keys() >= {"input", "output"}:
            stdin, stdout = columns["input"], columns["output"]
            own = _function(columns)
            if _is_function(columns, own):
                return _call(own or function, stdin, stdout)
            return StdioCase(_text(stdin), _text(stdout))
    raise ValueError(f"found a case of type {kind} without `input` and `output`")


def _function(columns: Mapping[str, object]) -> str | None:
    """Return the name of the function that a row, a label or a case names, as APPS or LiveCodeBench does."""
    more = columns.get("metadata")
    if isinstance(more, str):
        try:
            more = json.loads(more)
        except (ValueError, RecursionError):
            more = None
    places = [columns]
    if isinstance(more, Mapping):
        places.append(cast("Mapping[str, object]", more))
    for place in places:
        for key in ("fn_name", "func_name"):
            name = place.get(key)
            if name is not None and name != "":
                if not isinstance(name, str) or not name.isidentifier():
                    raise ValueError(f"found {key} {name!r}, expected the name of a function")
                return name
    return None


def _is_function(columns: Mapping[str, object], function: str | None) -> bool:
    """True if cases are calls of a function: `testtype` says so, or the name that they have themselves."""
    kind = columns.get("testtype", columns.get("type"))
    if kind in (None, ""):
        return function is not None
    if kind not in ("functional", "function_call", "stdin", "stdin_stdout"):
        raise ValueError(f"found testtype {kind!r}, expected functional or stdin")
    return kind in ("functional", "function_call")


def _call(function: str | None, arguments: object, returns: object) -> CallCase:
    """Return the case of a call. Texts hold JSON: of one argument in each line, and of the value."""
    if function is None:
        raise ValueError("found testtype functional without the name of the function (fn_name, or func_name)")
    if isinstance(arguments, str):
        values = [_json(line, "an input") for line in arguments.split("\n") if line.strip()]
    elif isinstance(arguments, list):
        values = cast("list[object]", arguments)
    else:
        raise ValueError(f"found an input of type {type(arguments).__name__}, expected a list of arguments")
    right: list[object] = [returns]
    if isinstance(returns, str):
        try:
            right = [_json(returns, "an output")]
        except ValueError:
            if isinstance(arguments, str):
                raise
        else:
            right += (
                [] if isinstance(arguments, str) else [returns]
            )  # beside values it may be the value itself
    elif isinstance(returns, list) and len(cast("list[object]", returns)) == 1:
        right += cast("list[object]", returns)  # some data sets wrap the value in a list
    return CallCase(function, values, tuple(right))


def _json(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"found {what} of a function that is no JSON: {text[:80]!r}") from None


def _as_json(value: object) -> object:
    """Return plain data as JSON has it. Raises ValueError for another kind, KeyError, TypeError."""
    if isinstance(value, list):
        return [_as_json(each) for each in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    tagged = cast("dict[str, object]", value)
    content = cast("list[object]", tagged["of"])
    if tagged["is"] == "tuple":
        return _as_json(content)
    if tagged["is"] in ("dict", "counter"):
        pairs = cast("list[tuple[object, object]]", content)
        return {key if isinstance(key, str) else json.dumps(key): _as_json(each) for key, each in pairs}
    raise ValueError(f"a {tagged['is']} is no value of JSON")


def _text(value: object) -> str:
    """Return the text of a stream. Some data sets have a list of its lines."""
    kind = type(value).__name__
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        lines = cast("list[object]", value)
        if all(isinstance(line, str) for line in lines):
            return "\n".join(map(str, lines))
    raise ValueError(f"found an input or output of type {kind}")


def same_output(printed: str, expected: str) -> bool:
    """True if two outputs are equal, except for white space at the ends of lines and of the text.

    Decimals are equal if their values are: 0.5 and 0.50.
    """
    ours, theirs = _lines(printed), _lines(expected)
    return ours == theirs or (len(ours) == len(theirs) and all(map(_same_line, ours, theirs)))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    words, expected = re.split(r"(\s+)", ours), re.split(r"(\s+)", theirs)
    return len(words) == len(expected) and all(map(_same_word, words, expected))


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    if "." not in theirs or not (_NUMBER.fullmatch(ours) and _NUMBER.fullmatch(theirs)):
        return False
    return Decimal(ours) == Decimal(theirs)


TYPING = frozenset(cast("list[str]", typing.__dict__["__all__"]))


def uses_of(statements: str) -> Uses:
    """Return what statements use of a program. Raises ValueError for statements that cannot test one."""
    try:
        tree = ast.parse(statements)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"found statements that are no Python ({error}): {statements[:80]!r}") from None
    defined = _own_names(tree)
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in defined]
    names = tuple(
        dict.fromkeys(
            name
            for name in used
            if not (hasattr(builtins, name) or name in MODULES or name in TYPING or name == "__name__")
        )
    )
    own: tuple[str, ...] = ()
    if not names:
        called = {name for call in _calls(tree) if (name := _called(call)) and name not in defined}
        own = names = tuple(sorted(called)) if len(called) == 1 else ()
    if not names:
        raise ValueError(
            f"found statements that use nothing of the program: {statements[:80]!r}; a function `check` "
            "must also be called"
        )
    for call in _calls(tree):
        _refuse_judge(tree, call, frozenset(names))
    return Uses(names, own)


def _own_names(tree: ast.AST) -> frozenset[str]:
    """Return all names that statements give a value themselves."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.arg():
                found.add(node.arg)
            case ast.alias():
                found.add(node.asname or node.name.partition(".")[0])
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.ExceptHandler(name=str(name)):
                found.add(name)
            case _:
                pass
    return frozenset(found)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _called(call: ast.Call) -> str | None:
    """Return the name at the root of what is called: ``a`` of ``a(...)`` and of ``a.b(...)``."""
    node: ast.expr = call
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _refuse_judge(tree: ast.AST, call: ast.Call, names: frozenset[str]) -> None:
    """Raise ValueError if a function of the program judges what another one returns: it could always agree.

    It may transform a result that is then compared, as in ``decode(encode(x)) == x``.
    """
    judge = _called(call)
    if judge not in names:
        return
    given = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    inner = {_called(each) for argument in call.args for each in _calls(argument)} & (names | given) - {judge}
    compared = [
        side
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and all(isinstance(each, ast.Eq) for each in node.ops)
        for side in (node.left, *node.comparators)
    ]
    passed_on = [argument for each in _calls(tree) if _called(each) in names for argument in each.args]
    if inner and not any(call is each for each in (*compared, *passed_on)):
        raise ValueError(
            f"found statements in which `{judge}`, which they do not define, judges the result of "
            f"`{min(map(str, inner))}`: a program could define it itself; put the code of `{judge}` into the "
            "statements"
        )
