"""Runs the cells of a notebook in order, inside of an event loop, as a kernel of Jupyter does.

python -m tests.runs.notebook NOTEBOOK
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


async def run_cells(notebook: Path) -> dict[str, Any]:
    """Return the names that the cells have left."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), names)
    return names


if __name__ == "__main__":
    left = asyncio.run(run_cells(Path(sys.argv[1])))
    print(json.dumps({"history": left["history"], "evaluated": left["evaluated"]}))
