"""Names of SGLang's parsers, of tool calls and of reasoning, read from the installed source.

The source is parsed and not imported: SGLang takes seconds, and changes the process that imports it.
"""

import ast
from functools import cache
from pathlib import Path
from typing import Literal

from slipstream.configs.installed import SGLANG, package_folder

Kind = Literal["tool_parser", "reasoning_parser"]

_PLACES: dict[Kind, tuple[str, str, str]] = {
    "tool_parser": ("srt/function_call/function_call_parser.py", "FunctionCallParser", "ToolCallParserEnum"),
    "reasoning_parser": ("srt/parser/reasoning_parser.py", "ReasoningParser", "DetectorMap"),
}
"""File, class and attribute with a mapping from names."""


@cache
def parser_names(kind: Kind) -> tuple[str, ...] | None:
    """Return the names of SGLang's parsers, sorted; None if they are not where they are expected."""
    file, class_name, attribute = _PLACES[kind]
    folder = package_folder(SGLANG.package)
    if folder is None:
        return None
    try:
        return _names(folder / file, class_name, attribute)
    except (OSError, SyntaxError, LookupError):
        return None


def _names(file: Path, class_name: str, attribute: str) -> tuple[str, ...]:
    """Return the keys of a mapping. Raises OSError, SyntaxError, and LookupError if it is no literal one."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not (isinstance(node, ast.ClassDef) and node.name == class_name):
            continue
        for item in node.body:
            target = item.target if isinstance(item, ast.AnnAssign) else None
            target = item.targets[0] if isinstance(item, ast.Assign) else target
            if isinstance(target, ast.Name) and target.id == attribute:
                return _keys(item)
    raise LookupError(f"{file} has no {class_name}.{attribute}")


def _keys(assignment: ast.stmt) -> tuple[str, ...]:
    value = assignment.value if isinstance(assignment, ast.Assign | ast.AnnAssign) else None
    if not isinstance(value, ast.Dict):
        raise LookupError("the parsers are no literal mapping")
    keys = [key.value for key in value.keys if isinstance(key, ast.Constant)]
    names = [key for key in keys if isinstance(key, str)]
    if len(names) != len(value.keys):
        raise LookupError("a name of a parser is no literal text")
    return tuple(sorted(names))
