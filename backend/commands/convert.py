"""``slipstream convert``: HF checkpoints into Megatron's distributed format and back, at any layout.

What can be wrong is found before a process is started, as far as headers and configs tell. Then a process for
each rank of the layout does its share (``megatron.conversion``), and one rename makes it the output.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, TypeVar

from slipstream.backend.checkpoint.folder import MANIFEST, CheckpointError, CheckpointFolder, describe
from slipstream.backend.cluster.local_ranks import run_ranks
from slipstream.backend.commands.outcome import WrongInput
from slipstream.bridge.families import ModelSpec, model_spec
from slipstream.bridge.hf import index as hf_index
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.hf.index import StoredTensor
from slipstream.bridge.model.layout import Layout, Shard, UnevenSplit
from slipstream.bridge.shards.check import check_tensors
from slipstream.bridge.shards.plan import entries, pieces_of
from slipstream.configs.load import load_layout
from slipstream.configs.schema import ParallelConfig
from slipstream.configs.violations import RecipeError

T = TypeVar("T")

TIMEOUT_S = 24 * 3600
"""Of a whole conversion. The ranks' waits for each other are shorter; this one is for a disk that hangs."""

INDEX, FORMAT = "metadata.json", "torch_dist"
"""The file by which Megatron knows a distributed checkpoint, and the format that it names."""


@dataclass(frozen=True)
class LayoutOptions:
    """What the command line says about the layout."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    layers: str | None = None
    """Numbers with commas between them."""

    def settings(self) -> dict[str, Any]:
        """As ``actor.parallel``: with the replicas that the experts need, and as a trainer would run it."""
        expert_ranks = self.expert * (self.expert_tensor or self.tensor)
        return {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "virtual_pipeline": self.virtual_pipeline,
            "expert": self.expert,
            "expert_tensor": self.expert_tensor,
            "layers": _numbers(self.layers) if self.layers else None,
            "data": max(expert_ranks // (gcd(expert_ranks, self.tensor) or 1), 1),
            "sequence": self.tensor > 1,
        }


def hf_to_megatron(model: Path, out: Path, options: LayoutOptions, dtype: str | None) -> str:
    """Convert, and say what was made. ``dtype``: None for that of the weights.

    Raises WrongInput; RankFailed or OSError when it is not the input that is wrong.
    """
    problems = _Problems("MODEL")
    spec, parallel = problems.model_and_layout(model, options)
    stored = problems.attempt("MODEL", lambda: check_tensors(spec)) if spec else None
    problems.output(out)
    problems.report()
    assert spec and parallel and stored
    dtype = dtype or _dtype_of(spec, stored)
    from slipstream.backend.megatron.conversion import write_megatron

    with _whole_or_absent(out) as folder:
        folder.mkdir()
        run_ranks(parallel.world_size, write_megatron, model, parallel, dtype, folder, timeout_s=TIMEOUT_S)
    return _account(out, spec, parallel)


def megatron_to_hf(checkpoint: Path, out: Path, model: Path, options: LayoutOptions) -> str:
    """Convert, and say what was made. Raises as ``hf_to_megatron``."""
    problems = _Problems("--model")
    spec, parallel = problems.model_and_layout(model, options)
    source = problems.attempt("CHECKPOINT", lambda: _megatron_checkpoint(checkpoint))
    problems.output(out)
    problems.report()
    assert spec and parallel and source
    from slipstream.backend.megatron.conversion import write_huggingface

    with _whole_or_absent(out) as folder:
        found, *_ = run_ranks(
            parallel.world_size, write_huggingface, source, model, parallel, folder, timeout_s=TIMEOUT_S
        )
        if found:
            raise WrongInput("\n  ".join([f"{source} is not a checkpoint of the model at {model}:", *found]))
    return f"{source} -> {_account(out, spec, parallel)}"


def _account(out: Path, spec: ModelSpec, parallel: ParallelConfig) -> str:
    ranks = f"{parallel.world_size} ranks" if parallel.world_size > 1 else "1 rank"
    parameters = sum(entry.numel for entry in entries(spec, Layout()))
    return f"{out}: {spec.geometry.family}, {parameters:,} parameters, by {ranks}"


# ---- the input


class _Problems:
    """Collects what is wrong, in the words of the command line rather than those of a recipe."""

    def __init__(self, model: str) -> None:
        """``model``: what the command line calls ``model.path``."""
        self._model = model
        self._found: list[str] = []

    def attempt(self, what: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (CheckpointError, hf_index.HfCheckpointError, UnsupportedModel) as error:
            self._add(f"{what}: {error}")
        except OSError as error:
            self._add(f"{what}: {describe(error)}")
        return None

    def model_and_layout(
        self, model: Path, options: LayoutOptions
    ) -> tuple[ModelSpec | None, ParallelConfig | None]:
        spec, parallel = self.attempt("model.path", lambda: model_spec(model)), None
        try:
            parallel = load_layout(model, options.settings())
        except RecipeError as error:
            for violation in error.violations:
                self._add(str(violation))
        if spec and parallel:
            for problem in _uneven(spec, Layout.of(parallel)):
                self._add(problem)
        return spec, parallel

    def output(self, out: Path) -> None:
        if out.exists() or out.is_symlink():
            self._add(f"OUT: {out} exists already; name a folder that does not, or move it away")

    def report(self) -> None:
        """Raises WrongInput when there is something to report."""
        if self._found:
            raise WrongInput("\n".join(self._found))

    def _add(self, problem: str) -> None:
        named = problem.replace("model.path", self._model)
        options = re.sub(r"actor\.parallel\.(\w+)", lambda found: f"--{found[1].replace('_', '-')}", named)
        self._found.append(options)


def _uneven(spec: ModelSpec, layout: Layout) -> list[str]:
    """What the ranks cannot share evenly, each size once."""
    found = {}
    for entry in entries(spec, layout):
        try:
            pieces_of(entry.split, Shard(0, layout.tensor if entry.expert is None else layout.etp))
        except UnevenSplit as error:
            found[str(error)] = None
    return list(found)


def _numbers(text: str) -> list[Any]:
    """What is no number stays text, for the check to name."""
    return [int(part) if part.strip().isdecimal() else part for part in text.split(",")]


def _dtype_of(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> str:
    """The one that loses nothing of the weights."""
    narrow = all(
        stored[name].dtype == "BF16"
        for entry in entries(spec, Layout())
        if not entry.mapping.float32
        for name in entry.hf_names
    )
    return "bfloat16" if narrow else "float32"


def _megatron_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` is, or the newest sound one of the run whose checkpoints are in it.

    Raises CheckpointError.
    """
    if not (path / INDEX).is_file():
        found = CheckpointFolder(path, keep_last=1).latest()
        if found is None:
            raise CheckpointError(
                f"{path} is no Megatron checkpoint: expected {INDEX} or a run's checkpoints (v00000010) in it"
            )
        path = found.path
    elif (path / MANIFEST).exists() and (problems := CheckpointFolder(path.parent, keep_last=1).verify(path)):
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}")
    try:
        about = json.loads((path / INDEX).read_text())
    except ValueError:
        about = None
    backend = about.get("sharded_backend") if isinstance(about, dict) else None
    if backend != FORMAT:
        raise CheckpointError(f"{path / INDEX} names the format {backend!r}; {FORMAT!r} is read")
    return path


# ---- the output


@contextmanager
def _whole_or_absent(out: Path) -> Iterator[Path]:
    """A path to write to that becomes ``out`` when nothing has gone wrong, and is gone otherwise.

    A conversion that was killed leaves the folder that it is in, and the next one to ``out`` deletes it.
    """
    staging = out.with_name(f".{out.name}.converting")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise WrongInput(f"OUT: cannot make {staging}: {describe(error)}") from error
    try:
        yield staging / out.name
        (staging / out.name).rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
