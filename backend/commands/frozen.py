"""What a job is submitted with, in its run folder: later changes of the recipe or the site do not reach it.

runs/NAME/submitted/TIME/recipe.yaml      the recipe with overrides and the site's settings: the job's recipe
                         submission.json  where they come from, the command, the environment, the packages
"""

import importlib.metadata
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from slipstream.backend.commands.outcome import Failed
from slipstream.backend.driver.start.job import SUBMITTED
from slipstream.configs.document import read_document
from slipstream.configs.schema.run import RunSection

RECORDED = (
    *("CUDA_", "GLOO_", "HF_", "LD_", "LOADEDMODULES", "NCCL_", "NVIDIA_", "OMP_", "PATH", "PYTHON"),
    *("PYTORCH_", "RAY_", "SGLANG_", "SLIPSTREAM_", "TORCH_", "TRITON_", "UCX_", "VIRTUAL_ENV"),
)
"""Beginnings of the variables that are recorded: those that change what a run does."""

_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def freeze(
    run: RunSection, seeds: str | None, data: Mapping[str, object], facts: Mapping[str, object]
) -> tuple[Path, list[Path]]:
    """Write what is submitted into the run folder, or for an array into that of each seed.

    ``data``: the recipe. ``facts``: the rest of ``submission.json``. Return the path of the recipe, in which
    ``%a`` stands for the seed, and the folders that were written. Raises Failed.
    """
    # As JSON, since PyYAML writes 1e-5, a text for YAML 1.1, without the quotes that the reader needs.
    recipe = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    names = [f"{run.name}-seed{seed}" for seed in seeds_of(seeds)] if seeds else [run.name]
    shown = f"{run.name}-seed%a" if seeds else run.name
    stamp, known = time.strftime("%Y%m%d-%H%M%S"), environment_facts(os.environ)
    folders = [run.root / name for name in names]
    number = 1
    while any((folder / SUBMITTED / stamp).exists() for folder in folders):
        number += 1
        stamp = f"{stamp.partition('_')[0]}_{number}"
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True, mode=int(run.mode, 8))
            place = folder / SUBMITTED / stamp
            place.mkdir(parents=True)
            (place / "recipe.yaml").write_text(recipe, encoding="utf-8")
            (place / "submission.json").write_text(json.dumps({**facts, **known}, indent=2) + "\n")
    except OSError as error:
        raise Failed(f"cannot write {error.filename}: {error.strerror or error}") from None
    place = folders[0] / SUBMITTED / stamp
    if read_document(place / "recipe.yaml", ()).data != data:
        raise Failed(f"{place}/recipe.yaml does not hold the recipe: a text has characters that YAML forbids")
    return run.root / shown / SUBMITTED / stamp / "recipe.yaml", [
        folder / SUBMITTED / stamp for folder in folders
    ]


def seeds_of(seeds: str) -> Iterator[int]:
    """Yield the seeds of ``sbatch --array``, each once.

    >>> list(seeds_of("0-3,8%2"))
    [0, 1, 2, 3, 8]
    """
    found: dict[int, None] = {}
    for part in seeds.partition("%")[0].split(","):
        match = _RANGE.fullmatch(part)
        assert match is not None, "option_problems lets nothing else through"
        first, last, step = match.groups()
        found.update(dict.fromkeys(range(int(first), int(last or first) + 1, int(step or 1))))
    yield from found


def environment_facts(variables: Mapping[str, str]) -> dict[str, object]:
    """Return the environment of this process: where it is, its variables without secrets, its packages."""
    return {
        "submitted": time.strftime("%FT%T%z"),
        "directory": str(Path.cwd()),
        "python": sys.version.split()[0],
        "prefix": sys.prefix,
        "variables": {
            name: value
            for name, value in sorted(variables.items())
            if name.startswith(RECORDED) and not _SECRET.search(name)
        },
        "packages": dict(
            sorted(
                {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}.items()
            )
        ),
    }


def thaw(places: Sequence[Path]) -> None:
    """Remove what ``freeze`` has written: nothing was submitted."""
    for place in places:
        shutil.rmtree(place)
        for folder in (place.parent, place.parent.parent):
            with suppress(OSError):  # there is more in it
                folder.rmdir()
