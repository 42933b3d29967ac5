"""Quantized weights: how HF checkpoints store them, and which of a model's weights an engine keeps in fp8.

Imports no torch; the arithmetic is in ``hf.quantized``. A quantized weight is stored as several tensors:

    block fp8      X.weight (e4m3), X.weight_scale_inv: one scale for each block of the weight
    packed int4    X.weight_packed (eight values in an int32), X.weight_scale (one for each group of columns),
                   X.weight_shape
    MXFP4          X_blocks (two values in a byte), X_scales (one for each group of 32 inputs), for experts
                   that are stacked in one tensor: outputs before inputs, unlike X
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from slipstream.bridge.hf.config import HfConfig, UnsupportedModel
from slipstream.bridge.hf.index import StoredTensor

FP8_SUFFIX = "_scale_inv"
"""Appended to the name of an fp8 weight, this is the name of its scales."""

BLOCK = 128
"""Rows and columns of a block in which SGLang's kernels expect one scale."""

BITS = 4
PER_INT32 = 32 // BITS

MXFP4_GROUP = 32
"""Inputs that share a scale in MXFP4."""

SETTING = "quantization_config"
OLD_SETTING = "compression_config"
"""Name of the setting that old versions of compressed-tensors wrote."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_SCALES = (*_FLOATS, "F8_E8M0")

_WAY_OUT = (
    "name the checkpoint in bfloat16 that these weights were made from, or one in block fp8 or in "
    "compressed-tensors' int4"
)


@dataclass(frozen=True)
class BlockFp8:
    """Weights in float8_e4m3fn with one scale for each block, as DeepSeek-V3 and Qwen3-FP8 have them."""

    block: tuple[int, int]
    """Rows and columns of a block."""
    ue8m0: bool
    """The scales are powers of two."""

    def __str__(self) -> str:
        rows, columns = self.block
        return f"fp8 in blocks of {rows}x{columns}" + (", scales are powers of two" if self.ue8m0 else "")

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight. Blocks at its edges may be smaller."""
        return tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))


@dataclass(frozen=True)
class PackedInt4:
    """Weights in four bits with a scale for each group of columns: compressed-tensors' pack-quantized."""

    group: int
    """Columns of a group."""

    def __str__(self) -> str:
        return f"int4 in groups of {self.group} (compressed-tensors)"


@dataclass(frozen=True)
class StackedMxfp4:
    """Stacked experts in 4-bit floats (e2m1), with a power of two for each group of inputs: gpt-oss."""

    def __str__(self) -> str:
        return f"MXFP4 in groups of {MXFP4_GROUP}"


Quantization = BlockFp8 | PackedInt4 | StackedMxfp4


@dataclass(frozen=True)
class QuantizedTensor(StoredTensor):
    """A quantized weight, whose shape and dtype are those that it has once it is dequantized.

    ``file`` is that of its values.
    """

    quantization: Quantization
    parts: tuple[tuple[str, StoredTensor], ...]
    """Names and tensors in the files: the values, the scales and, if it is stored, the shape."""


def quantization_of(hf: HfConfig) -> Quantization | None:
    """Return how the weights beside a config.json are quantized; None if they are not.

    Raises UnsupportedModel for a quantization that is not read.
    """
    language = hf.get("text_config")  # a model with a vision tower may have them there
    configs = (hf, cast("HfConfig", language)) if isinstance(language, dict) else (hf,)
    given = [config[name] for config in configs for name in (SETTING, OLD_SETTING) if config.get(name)]
    if not given:
        return None
    settings = given[0]
    if not isinstance(settings, dict):
        raise UnsupportedModel(f"{hf.get('model_type')}: {SETTING} is {settings!r}, expected an object")
    config = cast("dict[str, object]", settings)
    match config.get("quant_method"):
        case "fp8":
            return _block_fp8(config)
        case "compressed-tensors":
            return _packed_int4(config)
        case "mxfp4":
            return StackedMxfp4()
        case method:
            raise _not_read(f"by {method!r}", _REASONS.get(str(method), "there is no reader for this format"))


_REASONS = {
    "awq": "AWQ stores zero points and its own order of columns",
    "gptq": "GPTQ stores zero points and, with desc_act, its own order of columns",
    "bitsandbytes": "bitsandbytes stores its state in tensors of its own",
}
"""Why the weights of a ``quant_method`` are not read."""


def _not_read(how: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"its weights are quantized {how} ({SETTING} in config.json), which is not read: {reason}. "
        f"The trainer trains unquantized weights: {_WAY_OUT}"
    )


def _block_fp8(config: Mapping[str, object]) -> BlockFp8:
    block = config.get("weight_block_size")
    if config.get("activation_scheme", "dynamic") != "dynamic":
        raise _not_read(
            "in fp8 with stored scales of activations",
            f"activation_scheme is {config.get('activation_scheme')!r}, so that the model computes with "
            "scales that the trainer does not have",
        )
    if block is None:
        raise _not_read(
            "in fp8 with one scale for each tensor", "only scales for blocks (weight_block_size) are read"
        )
    sizes = cast("list[object]", block) if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise UnsupportedModel(f"weight_block_size is {block!r} in {SETTING}, expected [ROWS, COLUMNS]")
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _not_read(f"in fp8 of the format {config.get('fmt')!r}", "only e4m3 is read")
    rows, columns = cast("list[int]", sizes)
    return BlockFp8((rows, columns), ue8m0=config.get("scale_fmt") == "ue8m0")


def _packed_int4(config: Mapping[str, object]) -> PackedInt4:
    """Read the settings of compressed-tensors."""
    kind = "by compressed-tensors"
    if config.get("kv_cache_scheme"):
        raise _not_read(kind, "kv_cache_scheme gives scales of the KV cache, which the trainer does not have")
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and cast("dict[str, object]", sparsity).get("format") not in (
        None,
        "dense",
    ):
        raise _not_read(kind, "sparsity_config stores the places of zeros")
    if config.get("quantization_status", "compressed") != "compressed":
        raise _not_read(kind, f"quantization_status is {config['quantization_status']!r}, not 'compressed'")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _not_read(kind, "config_groups does not say how")
    sizes = {_group_size(group, config.get("format")) for group in cast("dict[str, object]", groups).values()}
    if len(sizes) != 1:
        raise _not_read(kind, f"its layers have groups of different sizes: {sorted(sizes)}")
    return PackedInt4(sizes.pop())


def _group_size(group: object, general_format: object) -> int:
    """Return the columns of a group of a scheme in ``config_groups``."""
    scheme = cast("dict[str, object]", group) if isinstance(group, dict) else {}
    weights = cast("dict[str, object]", scheme.get("weights") or {})
    form = scheme.get("format") or general_format
    if form != "pack-quantized" or scheme.get("input_activations"):
        activations = " with quantized activations" if scheme.get("input_activations") else ""
        raise _not_read(
            f"by compressed-tensors in the format {form!r}{activations}",
            "only 'pack-quantized' weights without quantized activations are",
        )
    expected: dict[str, tuple[object, ...]] = {
        "num_bits": (BITS,),
        "type": ("int",),
        "symmetric": (True,),
        "strategy": ("group",),
        "actorder": (None, False, "weight", "static"),
    }
    defaults: dict[str, object] = {"type": "int", "symmetric": True, "actorder": None}
    values = {name: weights.get(name, defaults.get(name)) for name in expected}
    if wrong := [f"{name}={values[name]!r}" for name, right in expected.items() if values[name] not in right]:
        raise _not_read(
            "by compressed-tensors",
            f"{', '.join(wrong)}; read are symmetric integers of 4 bits in groups of columns, in their order",
        )
    size = weights.get("group_size")
    if type(size) is not int or size < 1:
        raise UnsupportedModel(f"group_size is {size!r} in {SETTING}, expected a positive number")
    return size


def join_parts(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a checkpoint with one QuantizedTensor in place of its parts.

    Also returns what is wrong with weights, by their names.
    """
    tensors, problems = dict(stored), dict[str, str]()
    if isinstance(quantization, BlockFp8):
        for name, values in stored.items():
            if values.dtype == "F8_E4M3":
                _join_fp8(name, values, quantization, tensors, problems)
    elif isinstance(quantization, PackedInt4):
        for name, values in stored.items():
            if name.endswith(".weight_packed"):
                _join_int4(name, values, quantization, tensors, problems)
    elif isinstance(quantization, StackedMxfp4):
        for name, values in stored.items():
            if name.endswith("_blocks"):
                _join_mxfp4(name, values, quantization, tensors, problems)
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS and name.endswith((".weight", ".bias")) and name not in problems:
            reason = "announces no quantization" if quantization is None else f"announces {quantization}"
            problems[name] = f"{name} holds {tensor.dtype}, and {SETTING} in config.json {reason}"
    return tensors, problems


def _join_fp8(
    name: str,
    values: StoredTensor,
    quantization: BlockFp8,
    tensors: dict[str, StoredTensor],
    problems: dict[str, str],
) -> None:
    scale_name = name + FP8_SUFFIX
    scale = tensors.pop(scale_name, None)
    if scale is None:
        problems[name] = f"{name} is in fp8, and {scale_name} is missing"
    elif len(values.shape) != 2 or scale.shape != quantization.scale_shape(values.shape):
        problems[name] = (
            f"{scale_name} has shape {scale.shape}, which does not fit {name} with {values.shape} in blocks "
            f"of {quantization.block}"
        )
    elif scale.dtype not in _SCALES:
        problems[name] = f"{scale_name} holds {scale.dtype}, expected one of {', '.join(_SCALES)}"
    else:
        parts = ((name, values), (scale_name, scale))
        tensors[name] = QuantizedTensor(values.file, values.shape, "BF16", quantization, parts)


def _join_int4(
    name: str,
    values: StoredTensor,
    quantization: PackedInt4,
    tensors: dict[str, StoredTensor],
    problems: dict[str, str],
) -> None:
    weight = name.removesuffix("_packed")
    scale, shape = tensors.pop(f"{weight}_scale", None), tensors.pop(f"{weight}_shape", None)
    del tensors[name]
    absent = [f"{weight}_{part}" for part, each in (("scale", scale), ("shape", shape)) if each is None]
    if scale is None or shape is None:
        problems[weight] = f"{name} is there, and {', '.join(absent)} is missing"
        return
    if len(scale.shape) != 2 or scale.dtype not in _FLOATS or values.dtype != "I32":
        problems[weight] = (
            f"{name} ({values.dtype}) and {weight}_scale ({scale.dtype}, {scale.shape}) are no packed int4"
        )
        return
    rows, columns = scale.shape[0], scale.shape[1] * quantization.group
    if values.shape != (rows, -(-columns // PER_INT32)):
        problems[weight] = (
            f"{name} has shape {values.shape}, which does not fit {weight}_scale with {scale.shape} in "
            f"groups of {quantization.group} columns"
        )
        return
    parts = ((name, values), (f"{weight}_scale", scale), (f"{weight}_shape", shape))
    tensors[weight] = QuantizedTensor(values.file, (rows, columns), scale.dtype, quantization, parts)


def _join_mxfp4(
    name: str,
    values: StoredTensor,
    quantization: StackedMxfp4,
    tensors: dict[str, StoredTensor],
    problems: dict[str, str],
) -> None:
    weight = name.removesuffix("_blocks")
    scale = tensors.pop(f"{weight}_scales", None)
    del tensors[name]
    if scale is None:
        problems[weight] = f"{name} is there, and {weight}_scales is missing"
    elif values.shape != (*scale.shape, MXFP4_GROUP // 2) or len(scale.shape) != 3:
        problems[weight] = (
            f"{name} has shape {values.shape}, which does not fit {weight}_scales {scale.shape}"
        )
    elif (values.dtype, scale.dtype) != ("U8", "U8"):
        problems[weight] = f"{name} ({values.dtype}) and {weight}_scales ({scale.dtype}) are no MXFP4"
    else:
        experts, outputs, groups = scale.shape
        parts = ((name, values), (f"{weight}_scales", scale))
        shape = (experts, groups * MXFP4_GROUP, outputs)
        tensors[weight] = QuantizedTensor(values.file, shape, "BF16", quantization, parts)


# ---- weights of engines

FP8_FAMILIES = frozenset(
    {
        *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "kimi_k2", "minimax_m2"),
        *("qwen2", "qwen3", "qwen3_moe"),
    }
)
"""Families whose models in SGLang load what ``EngineFp8`` says, which a test shows."""

NO_SCALES = frozenset({"llama", "mistral"})
"""Families whose models in SGLang 0.5.21 drop the scales of blocks: they look for them under another name."""

_PROJECTIONS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        *("gate_proj", "up_proj", "down_proj"),
        *("w1", "w2", "w3"),
    }
)
_LAYER = re.compile(r"(model\.|language_model\.)*layers\.\d+\.")


@dataclass(frozen=True)
class EngineFp8:
    """The fp8 weights of an engine, as SGLang's ``Fp8Config`` has them.

    SGLang quantizes its linear layers and experts: the projections of attention and of feed-forward layers,
    ``kv_b_proj`` among them. Embeddings, the head, norms, routers and biases stay as they are.
    """

    ue8m0: bool = True
    """The scales are powers of two, as those of SGLang's own ``per_block_cast_to_fp8``."""

    @classmethod
    def of(cls, stored: Quantization | None) -> "EngineFp8":
        """Return the format for engines whose policy starts from such a checkpoint.

        The kind of its scales is kept: a second rounding to other scales would change unchanged weights.
        """
        return cls(ue8m0=stored.ue8m0 if isinstance(stored, BlockFp8) else True)

    @property
    def stored(self) -> BlockFp8:
        """Return the quantization of files with these weights."""
        return BlockFp8((BLOCK, BLOCK), self.ue8m0)

    def quantizes(self, name: str) -> bool:
        """Return whether the engine keeps the weight with this HF name in fp8."""
        module, _, kind = name.rpartition(".")
        return kind == "weight" and module.rpartition(".")[2] in _PROJECTIONS and bool(_LAYER.match(name))

    def config(self, names: Iterable[str]) -> dict[str, object]:
        """Return the ``quantization_config`` for files with all these weights."""
        plain = {
            name.removesuffix(".weight")
            for name in names
            if name.endswith(".weight") and not name.endswith("norm.weight") and not self.quantizes(name)
        }
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            **({"scale_fmt": "ue8m0"} if self.ue8m0 else {}),
            "modules_to_not_convert": sorted(plain),
        }
