"""``python -m tests`` lists what tests share: the first sentence of each helper, by folder."""

import ast
import sys
from itertools import groupby
from pathlib import Path

TESTS = Path(__file__).parent
NO_HELPERS = {"__init__.py", "__main__.py", "conftest.py"}


def helpers(folder: Path = TESTS) -> dict[Path, str]:
    """Return the first line of the docstring of each module that is no test, by its path."""
    found = {}
    for path in sorted(folder.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        if path.name not in NO_HELPERS and not path.name.startswith("test_"):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            found[path.relative_to(folder.parent)] = text.partition("\n")[0]
    return found


if __name__ == "__main__":
    for parent, lines in groupby(helpers().items(), key=lambda item: item[0].parent):
        sys.stdout.write(f"{parent}\n")
        sys.stdout.writelines(f"    {path.stem:32} {line}\n" for path, line in lines)
