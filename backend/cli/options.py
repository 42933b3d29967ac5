"""Options and arguments that several commands have, and how what ends a command is reported."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.backend.commands.outcome import CommandError, Failed, WrongInput
from slipstream.configs.violations import RecipeError

errors = Console(stderr=True, soft_wrap=True, highlight=False)

Recipe = Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes with Slipstream.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the recipe's.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run of this name where its last process ended.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete the earlier run of this name, and start anew.")
]
DebugRolloutOnly = Annotated[
    bool,
    typer.Option(
        "--debug-rollout-only",
        help="Generate, judge and save each batch, without a trainer: in the run folder NAME-rollout-only.",
    ),
]
DebugTrainOnly = Annotated[
    Path | None,
    typer.Option(
        "--debug-train-only",
        metavar="FOLDER",
        help="Train on the batches that --debug-rollout-only has saved, without engines: in the run folder "
        "NAME-train-only.",
    ),
]
AcceptChangedInputs = Annotated[
    bool,
    typer.Option(
        "--accept-changed-inputs",
        help="With --resume: go on although the content of a data set or of the model has changed.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for scripts.")]
ModelConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="The model's config.json, or its folder, where neither the model nor the prompts are.",
    ),
]
Sft = Annotated[bool, typer.Option("--sft", help="The recipe is one of `slipstream sft`.")]


@contextmanager
def reported() -> Iterator[None]:
    """Print what ends a command on standard error, and exit with its code."""
    try:
        yield
    except (CommandError, RecipeError) as error:
        errors.print(str(error), markup=False)
        code = error.exit_code if isinstance(error, CommandError) else WrongInput.exit_code
        raise typer.Exit(code) from None
    except PermissionError as error:
        name = error.filename if error.filename is not None else "a file"
        errors.print(f"{name}: {error.strerror}; expected a path that you may use", markup=False)
        raise typer.Exit(WrongInput.exit_code) from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            name = error.filename if error.filename is not None else "the output"
            errors.print(f"failed: {name} cannot be written: {error.strerror}", markup=False)
            raise typer.Exit(Failed.exit_code) from None
        if error.errno not in OF_PATHS or error.filename is None:
            raise
        errors.print(f"{error.filename}: {error.strerror}; expected another path", markup=False)
        raise typer.Exit(WrongInput.exit_code) from None


OF_PATHS = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS}
"""Errors of paths that lead to something else than was expected."""


NEEDED = sys.stdlib_module_names | {
    "aiohttp", "megatron", "msgspec", "numpy", "pydantic", "ray", "sglang", "tensorboard", "torch",
    "transformer_engine", "transformers", "yaml",
}  # fmt: skip
"""Modules that everything breaks without."""


def hiding_modules(folder: Path) -> list[str]:
    """Return the files and packages in a folder that are imported in place of a needed module, by name."""
    with suppress(OSError):
        named = [path for path in folder.iterdir() if path.stem in NEEDED]
        return sorted(path.name for path in named if path.suffix == ".py" or (path / "__init__.py").exists())
    return []


def check_options(resume: bool, accept_changed_inputs: bool, overwrite: bool) -> None:
    """Raise WrongInput for options of a start that contradict each other."""
    if resume and overwrite:
        raise WrongInput("--resume goes on with a run that --overwrite deletes: expected one of them")
    if accept_changed_inputs and not resume:
        raise WrongInput(
            "--accept-changed-inputs has no meaning without --resume: a new run takes what it gets"
        )
