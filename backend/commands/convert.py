"""``slipstream convert``: converts HF checkpoints to Megatron's distributed format and back, at any layout.

Headers and configs are checked before a process is started. Then one process for each rank of the layout
converts its shards (``megatron.conversion``), and a single rename puts the output in its place.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from typing import TypeVar

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError, describe
from slipstream.backend.checkpoint.folder import CheckpointFolder
from slipstream.backend.checkpoint.manifest import MANIFEST
from slipstream.backend.cluster.local_ranks import run_ranks
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.driver.start.plugin_checks import check_family
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf import index as hf_index
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.hf.index import StoredTensor
from slipstream.bridge.model.layout import Layout, Shard, UnevenSplit
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.check import check_tensors
from slipstream.bridge.shards.plan import entries, pieces_of
from slipstream.configs.load import load_layout
from slipstream.configs.schema import ParallelConfig
from slipstream.configs.violations import RecipeError
from slipstream.rollout.system import plugins

T = TypeVar("T")

TIMEOUT_S = 24 * 3600
"""Limit of a whole conversion, for disks that hang: ranks wait less long than this for each other."""

INDEX, FORMAT = "metadata.json", "torch_dist"
"""File by which Megatron recognizes a distributed checkpoint, and the format that this file must name."""


RECIPE_WAY = "name a module of yours in model.families"
OPTION_WAY = "name a module of yours with --family MODEL_TYPE=IMPORT.PATH"
"""The way out of a model that is not mapped, in a recipe and here."""


@dataclass(frozen=True)
class LayoutOptions:
    """The layout as the command line gives it."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    layers: str | None = None
    """Numbers separated by commas."""

    def settings(self) -> dict[str, object]:
        """Return settings for ``actor.parallel`` with the smallest `data` that the experts allow."""
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


def hf_to_megatron(
    model: Path, out: Path, options: LayoutOptions, dtype: str | None, families: Sequence[str] = ()
) -> str:
    """Convert the weights and return a line that describes the output.

    ``dtype`` None keeps the dtype of the weights. ``families``: model families of the user's, each as
    ``MODEL_TYPE=IMPORT.PATH``. Raises WrongInput, and RankFailed or OSError for a failure
    that the input did not cause.
    """
    problems = _Problems("MODEL")
    own = problems.families(families)
    spec, parallel = problems.model_and_layout(model, options, own)
    stored = problems.attempt("MODEL", lambda: check_tensors(spec)) if spec else None
    problems.output(out)
    problems.report()
    assert spec and parallel and stored
    dtype = dtype or _dtype_of(spec, stored)
    from slipstream.backend.megatron.conversion import write_megatron

    with _whole_or_absent(out) as folder:
        folder.mkdir()
        run_ranks(
            parallel.world_size, write_megatron, model, parallel, dtype, folder, own, timeout_s=TIMEOUT_S
        )
    return _account(out, spec, parallel)


def megatron_to_hf(
    checkpoint: Path,
    out: Path,
    model: Path,
    options: LayoutOptions,
    families: Sequence[str] = (),
    *,
    adapter_alone: bool = False,
) -> str:
    """Convert the weights and return a line that describes the output. Raises like ``hf_to_megatron``.

    ``adapter_alone``: write the adapter in PEFT's format, instead of weights into which it is merged.
    """
    problems = _Problems("--model")
    own = problems.families(families)
    spec, parallel = problems.model_and_layout(model, options, own)
    source = problems.attempt("CHECKPOINT", lambda: _megatron_checkpoint(checkpoint))
    problems.output(out)
    problems.report()
    assert spec and parallel and source
    from slipstream.backend.megatron.conversion import write_huggingface

    with _whole_or_absent(out) as folder:
        write = partial(write_huggingface, adapter_alone=adapter_alone)
        mismatches, *_ = run_ranks(
            parallel.world_size, write, source, model, parallel, folder, own, timeout_s=TIMEOUT_S
        )
        if mismatches:
            heading = f"{source} is not a checkpoint of the model at {model}:"
            raise WrongInput("\n  ".join([heading, *mismatches]))
    if adapter_alone:
        return f"{source} -> {out}: the adapter of {model}, by {_ranks(parallel)}"
    return f"{source} -> {_account(out, spec, parallel)}"


def _account(out: Path, spec: ModelSpec, parallel: ParallelConfig) -> str:
    parameters = sum(entry.numel for entry in entries(spec, Layout()))
    line = f"{out}: {spec.geometry.family}, {parameters:,} parameters, by {_ranks(parallel)}"
    return "\n".join([line, *(f"  {spec.path}: {note}" for note in spec.notes)])


def _ranks(parallel: ParallelConfig) -> str:
    return f"{parallel.world_size} ranks" if parallel.world_size > 1 else "1 rank"


# ---- the input


class _Problems:
    """Collects problems of the input, and names settings of the recipe as the command line names them."""

    def __init__(self, model: str) -> None:
        """``model`` is the command line's name for ``model.path``."""
        self._model = model
        self._problems: list[str] = []

    def attempt(self, what: str, read: Callable[[], T]) -> T | None:
        """Return what ``read`` returns; None if it fails, which becomes a problem of ``what``."""
        try:
            return read()
        except (CheckpointError, hf_index.HfCheckpointError, UnsupportedModel) as error:
            self._add(f"{what}: {error}")
        except OSError as error:
            self._add(f"{what}: {describe(error)}")
        return None

    def families(self, given: Sequence[str]) -> dict[str, str]:
        """Return the import paths of sound families by their ``model_type``."""
        own: dict[str, str] = {}
        for each in given:
            kind, _, path = each.partition("=")
            if not kind or "." not in path:
                self._add(f"--family {each}: expected MODEL_TYPE=IMPORT.PATH, as dots1=my_package.dots1")
                continue
            try:
                check_family(path)
                own[kind] = path
            except plugins.PluginError as error:
                self._add(f"--family {kind}: {error}")
        return own

    def model_and_layout(
        self, model: Path, options: LayoutOptions, own: Mapping[str, str]
    ) -> tuple[ModelSpec | None, ParallelConfig | None]:
        parallel = None
        try:
            spec = self.attempt("model.path", lambda: model_spec(model, plugins.resolved(own)))
        except Exception as error:  # a family of the user's
            if not own:
                raise
            spec = None
            self._add(f"--family: {plugins.raised(error)}")
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
        """Raise WrongInput if there is any problem."""
        if self._problems:
            raise WrongInput("\n".join(self._problems))

    def _add(self, problem: str) -> None:
        named = problem.replace("model.path", self._model).replace(RECIPE_WAY, OPTION_WAY)
        options = re.sub(r"actor\.parallel\.(\w+)", lambda match: f"--{match[1].replace('_', '-')}", named)
        self._problems.append(options)


def _uneven(spec: ModelSpec, layout: Layout) -> list[str]:
    """Return a message for each size that the ranks cannot split evenly."""
    messages: dict[str, None] = {}
    for entry in entries(spec, layout):
        try:
            pieces_of(entry.split, Shard(0, layout.tensor if entry.expert is None else layout.etp))
        except UnevenSplit as error:
            messages[str(error)] = None
    return list(messages)


def _numbers(text: str) -> list[int | str]:
    """Split ``text`` at its commas. Parts that are not numbers stay text, so that the check can name them."""
    return [int(part) if part.strip().isdecimal() else part for part in text.split(",")]


def _dtype_of(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> str:
    """Return the narrowest dtype that holds the weights exactly; bfloat16 for those in fp8."""
    narrow = all(
        stored[name].dtype == "BF16"
        for entry in entries(spec, Layout())
        if not entry.mapping.float32
        for name in entry.hf_names
    )
    return "bfloat16" if narrow else "float32"


def _megatron_checkpoint(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint, or the newest sound checkpoint in it if it holds a run's.

    Raises CheckpointError.
    """
    if not (path / INDEX).is_file():
        newest = CheckpointFolder(path, keep_last=1).latest()
        if newest is None:
            raise CheckpointError(
                f"{path} is no Megatron checkpoint: expected {INDEX} or a run's checkpoints (v00000010) in it"
            )
        path = newest.path
    elif (path / MANIFEST).exists() and (problems := CheckpointFolder(path.parent, keep_last=1).verify(path)):
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}")
    try:
        index = json.loads((path / INDEX).read_text())
    except ValueError:
        index = None
    backend = index.get("sharded_backend") if isinstance(index, dict) else None
    if backend != FORMAT:
        raise CheckpointError(f"{path / INDEX} names the format {backend!r}; {FORMAT!r} is read")
    return path


# ---- the output


@contextmanager
def _whole_or_absent(out: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes ``out`` unless the body raises; then it is deleted.

    A killed conversion leaves its staging folder; the next conversion to ``out`` deletes it.
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
