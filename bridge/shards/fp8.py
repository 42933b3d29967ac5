"""Engines that hold weights in fp8: what is sent to them, and which models and layouts they can hold.

Imports no torch. SGLang's kernels multiply by blocks of 128 x 128, so each rank of an engine must hold whole
blocks. Scales do not depend on the ranks: a block has the same scale wherever it is quantized.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.hf.index import stored_tensors
from slipstream.bridge.hf.quantization import (
    BLOCK,
    FP8_FAMILIES,
    FP8_SUFFIX,
    NO_SCALES,
    EngineFp8,
    QuantizedTensor,
    join_parts,
)
from slipstream.bridge.model.mapping import Columns, Mapping, Rows, Shape, is_attention
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import ExportPlan

FP8_DTYPE, SCALE_DTYPE = "float8_e4m3fn", "float32"
"""Torch's names of the dtypes of fp8 weights and of their scales."""


@dataclass(frozen=True)
class SentTensors:
    """Tensors of one dtype that are sent together."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtype: str
    """Torch's name."""


def sent_tensors(
    names: Sequence[str], shapes: Sequence[Shape], dtype: str, fp8: EngineFp8 | None
) -> list[SentTensors]:
    """Return the tensors by which an engine knows the HF tensors of a bucket, in the order of sending."""
    if fp8 is None:
        return [SentTensors(tuple(names), tuple(shapes), dtype)]
    named = list(zip(names, shapes, strict=True))
    plain = [(name, shape) for name, shape in named if not fp8.quantizes(name)]
    values = [(name, shape) for name, shape in named if fp8.quantizes(name)]
    scales = [(name + FP8_SUFFIX, fp8.stored.scale_shape(shape)) for name, shape in values]
    groups = ((plain, dtype), (values, FP8_DTYPE), (scales, SCALE_DTYPE))
    return [
        SentTensors(tuple(name for name, _ in group), tuple(shape for _, shape in group), kind)
        for group, kind in groups
        if group
    ]


def sent_by(plan: ExportPlan, dtype: str, fp8: EngineFp8 | None) -> list[SentTensors]:
    """Return what an engine gets of a plan, in the order of sending.

    ``dtype``: torch's name of the dtype of the weights.
    """
    return [
        tensors
        for bucket in plan.buckets
        for tensors in sent_tensors(
            bucket.hf_names, bucket.hf_shapes, "float32" if bucket.float32 else dtype, fp8
        )
    ]


def engine_fp8(quantization: str | None, spec: ModelSpec) -> EngineFp8 | None:
    """Return the format of engines with this ``rollout.engine.quantization``. Raises UnsupportedModel."""
    if quantization is None:
        return None
    family = spec.geometry.family
    if family not in FP8_FAMILIES:
        reason = (
            "SGLang loads its fp8 weights without their scales"
            if family in NO_SCALES
            else "which of its weights SGLang keeps in fp8 was not verified"
        )
        raise UnsupportedModel(
            f"rollout.engine.quantization: {quantization} is not supported for the model_type {family!r}: "
            f"{reason}. It is for {', '.join(sorted(FP8_FAMILIES))}; set it to null"
        )
    return EngineFp8.of(spec.quantization)


def is_stored_for_engines(spec: ModelSpec, fp8: EngineFp8 | None) -> bool:
    """Return whether engines can start from the checkpoint itself. Raises HfCheckpointError.

    They must begin with the same weights in fp8 in which they get later versions, and with a config that is
    right about the head: by a wrong one they would drop it.
    """
    if spec.corrects_tie:
        return False
    if fp8 is None or spec.quantization is None:
        return fp8 is None and spec.quantization is None
    if spec.quantization != fp8.stored:
        return False
    tensors, _ = join_parts(stored_tensors(spec.path), spec.quantization)
    return all(fp8.quantizes(name) == isinstance(tensor, QuantizedTensor) for name, tensor in tensors.items())


def fp8_problems(
    spec: ModelSpec, fp8: EngineFp8, *, ranks: int, expert_ranks: int = 1, attention_groups: int = 1
) -> list[str]:
    """Return why engines of ``ranks`` tensor-parallel ranks cannot hold the model in fp8.

    ``expert_ranks``: how many ranks hold different experts; the others share an expert. ``attention_groups``:
    groups of ranks of data-parallel attention, each of which holds all heads.
    """
    problems: dict[str, None] = {}
    for mapping in _quantized(spec, fp8):
        groups = attention_groups if is_attention(mapping.hf[0]) else 1
        size = ranks // (expert_ranks if mapping.per_expert else groups)
        for hf, (name, shape) in enumerate(zip(mapping.hf, mapping.split.hf_shapes, strict=True)):
            rows, columns = _held(mapping, hf, shape, size)
            wrong = [
                f"{count} {what}"
                for count, what, matters in (
                    (rows, "rows", _has_row_borders(mapping, name, size)),
                    (columns, "columns", True),
                )
                if matters and count % BLOCK
            ]
            if wrong:
                problems[f"{_module(name)} has {' and '.join(wrong)} on each of {size} ranks"] = None
    if not problems:
        return []
    listed = "; ".join(problems)
    return [
        f"rollout.engine.quantization: SGLang multiplies by fp8 weights in blocks of {BLOCK} x {BLOCK}, and "
        f"expects multiples of {BLOCK}: {listed}; use another rollout.engine.tensor_parallel, or set this to "
        "null"
    ]


def _quantized(spec: ModelSpec, fp8: EngineFp8) -> Iterator[Mapping]:
    """Yield the mappings of a model that engines hold in fp8, each kind of layer once."""
    for layer in dict.fromkeys(spec.mappings.layers):
        for mapping in layer:
            if all(fp8.quantizes(name.format(layer=0, expert=0)) for name in mapping.hf):
                yield mapping


def _held(mapping: Mapping, hf: int, shape: Shape, ranks: int) -> tuple[int, int]:
    """Return the rows and columns of HF tensor number ``hf`` that a rank of an engine holds."""
    rows, columns = shape
    split = mapping.split
    if isinstance(split, Columns):
        return rows, columns // ranks
    if isinstance(split, Rows):
        # Key-value heads that are fewer than the ranks are repeated.
        repeated = hf > 0 and len(split.rows) == 3
        return rows // (min(ranks, split.units or ranks) if repeated else ranks), columns
    return rows, columns


def _has_row_borders(mapping: Mapping, name: str, ranks: int) -> bool:
    """Return whether something else begins in SGLang's parameter, or on another rank, where these rows end.

    The down projections of latent attention are one parameter, which every rank has whole.
    """
    is_split = isinstance(mapping.split, Rows) and ranks > 1
    return is_split or len(mapping.hf) > 1 or name.endswith(".q_a_proj.weight")


def _module(name: str) -> str:
    """Return an HF name of a mapping without the layer and the expert."""
    parts = name.removesuffix(".weight").split(".")
    return ".".join(part for part in parts[2:] if part not in ("{layer}", "{expert}"))
