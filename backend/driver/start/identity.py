"""``inputs.json``: the data sets and the model that a run has used, identified by their content.

A file is known by its size and a hash of evenly spaced blocks, its first and its last one among them. So it
may move, and must not change. Files of up to ``SAMPLES`` MiB are hashed as a whole; of larger ones so much is
read, however large they are. A model folder is known by its configuration, its tokenizer and its weights.
"""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from slipstream.backend.driver.start.inputs import InputError
from slipstream.configs.schema import PromptFile, RunConfig, path_text
from slipstream.rollout.prompts.reading import local_files
from slipstream.rollout.system.durable import write_durably

INPUTS = "inputs.json"
ACCEPT = "--accept-changed-inputs"
"""Option of the command line that lets a run go on with other inputs."""

BLOCK = 2**20
SAMPLES = 64
"""Blocks that are hashed of a large data set."""
WEIGHT_SAMPLES = 4
"""Blocks that are hashed of each large file of a model, which may have hundreds of them."""

MODEL_FILES = (
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
)
"""Files of an HF checkpoint that determine what a run makes of it."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Identity(_Strict):
    """Content of an input, as far as it was read."""

    bytes: NonNegativeInt
    sha256: str = Field(description="Of the names, the sizes and the sampled blocks of the files.")

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes, SHA-256 of samples {self.sha256[:16]}"


class KnownInput(_Strict):
    """An input of a run, and where it was read last."""

    path: str
    identity: Identity

    def __str__(self) -> str:
        return f"{self.path} with {self.identity}"


class AcceptedChange(_Strict):
    """A change of an input that the user has accepted."""

    time: str
    setting: str
    before: KnownInput | None = Field(description="None: the record of it was lost.")
    after: KnownInput


class KnownInputs(_Strict):
    """Content of ``inputs.json``."""

    inputs: dict[str, KnownInput] = Field(description="By the setting that names it.")
    accepted: list[AcceptedChange] = []

    def write(self, folder: Path) -> None:
        """Write ``inputs.json`` into the run folder. Raises OSError."""
        write_durably(folder / INPUTS, self.model_dump_json(indent=2) + "\n")


def identify(path: Path) -> Identity:
    """Return the identity of a data set, or of the HF checkpoint in a folder. Raises OSError."""
    if not path.is_dir():
        return _identity(list(local_files(path)), path.parent, SAMPLES)
    files = {file for pattern in MODEL_FILES for file in path.glob(pattern) if file.is_file()}
    return _identity(sorted(files), path, WEIGHT_SAMPLES)


def current_inputs(config: RunConfig) -> KnownInputs:
    """Identify the inputs that the recipe names. Raises OSError."""
    inputs = {"model.path": KnownInput(path=str(config.model.path), identity=identify(config.model.path))}
    for file in (*config.training_files, *config.held_out_files):
        inputs[_name_of(file)] = KnownInput(path=path_text(file.path), identity=identify(file.path))
    return KnownInputs(inputs=inputs)


def _name_of(file: PromptFile) -> str:
    """Return the setting of a prompt file, with its name in place of its number."""
    section, *more, path = file.setting.split(".")
    return ".".join([section, *more[:1], *([file.name] if file.name else []), path])


def inputs_to_go_on_with(
    config: RunConfig, *, accept_changes: bool, note: Callable[[str], None]
) -> tuple[KnownInputs, set[str]]:
    """Compare the inputs of the recipe with those that the run in its folder has used.

    Return the record for ``inputs.json``, and the settings whose inputs have changed. An input that the run
    has not had before, such as the prompts of a first evaluation, is no change. ``note`` tells the user of
    accepted changes. Raises InputError when an input has changed, unless ``accept_changes``, and OSError.
    """
    record, damage = _read(config.run.folder / INPUTS)
    now = current_inputs(config).inputs
    changed = {
        setting: before
        for setting, known in now.items()
        if (before := record.inputs.get(setting)) is not None and before.identity != known.identity
    }
    problems = [f"{setting}: {now[setting]}, but the run has used {changed[setting]}" for setting in changed]
    problems += [damage] if damage else []
    if problems and not accept_changes:
        ways = ["name inputs with the content that the run has used, at any path"] if changed else []
        ways += [f"restore {INPUTS} from a copy"] if damage else []
        raise InputError(
            "\n".join(problems) + f"\nto resume {config.run.folder}, {' and '.join(ways)}; or go on with "
            f"these inputs by {ACCEPT}; for another run, choose another run.name"
        )
    for problem in problems:
        note(f"accepted: {problem}")
    unknown: dict[str, KnownInput | None] = dict.fromkeys(now) if damage else {}
    time = datetime.now(UTC).isoformat(timespec="seconds")
    accepted = [
        AcceptedChange(time=time, setting=setting, before=before, after=now[setting])
        for setting, before in (changed | unknown).items()
    ]
    known = KnownInputs(inputs=record.inputs | now, accepted=record.accepted + accepted)
    return known, {change.setting for change in accepted}


def _read(path: Path) -> tuple[KnownInputs, str | None]:
    """Return the record of a run folder, or an empty one and what is wrong with the file."""
    try:
        return KnownInputs.model_validate_json(path.read_bytes()), None
    except FileNotFoundError:
        reason = "is missing"
    except ValidationError:
        reason = "cannot be understood"
    return KnownInputs(inputs={}), f"{path} {reason}: it says which data the run has used"


def _identity(files: list[Path], folder: Path, samples: int) -> Identity:
    """Return the identity of several files. Names within ``folder`` count only where there are several."""
    digest, total = hashlib.sha256(), 0
    for path in files:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            inside = path.relative_to(folder).as_posix() if folder in path.parents else path.name
            name = inside if len(files) > 1 else ""
            digest.update(f"{name}\0{size}\0".encode())
            for offset in _offsets(size, samples):
                digest.update(_block(file, offset))
            total += size
    return Identity(bytes=total, sha256=digest.hexdigest())


def _offsets(size: int, samples: int) -> list[int]:
    """Return where the hashed blocks of a file begin."""
    if size <= SAMPLES * BLOCK:
        return list(range(0, size, BLOCK))
    return [number * (size - BLOCK) // (samples - 1) for number in range(samples)]


def _block(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.read(BLOCK)
