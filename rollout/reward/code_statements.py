"""What assert statements use of the program that they test. Pure."""

import ast
import builtins
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from slipstream.rollout.reward.code_calls import MODULES

TYPING = frozenset(cast("list[str]", typing.__dict__["__all__"]))


@dataclass(frozen=True)
class Uses:
    """Names that a program must define."""

    names: tuple[str, ...]
    """In the order of the statements."""
    own: tuple[str, ...] = ()
    """Those of them that Python has as well, such as ``sum``: the statements test the program's function."""


def uses_of(statements: str) -> Uses:
    """Return what statements use of a program. Raises ValueError for statements that cannot test one."""
    try:
        tree = ast.parse(statements)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"found statements that are no Python ({error}): {statements[:80]!r}") from None
    defined = _defined(tree)
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


def _defined(tree: ast.AST) -> frozenset[str]:
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
