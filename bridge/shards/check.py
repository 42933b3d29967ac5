"""Compare an HF checkpoint with its config, by names and shapes. Imports no torch."""

from slipstream.bridge.hf.index import HfCheckpointError, StoredTensor, listing
from slipstream.bridge.hf.kept import TIED
from slipstream.bridge.hf.quantization import QuantizedTensor, join_parts
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.mapping import OUTPUT
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import entries


def check_tensors(spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return the checkpoint's tensors by name: each is mapped once and has the expected shape.

    A quantized weight is one QuantizedTensor. Raises HfCheckpointError with all tensors that are missing, not
    mapped, of another shape or dtype, or quantized in another way than config.json says.
    """
    expected: dict[str, tuple[int, ...]] = {}
    optional: set[str] = set()
    problems: list[str] = []
    for entry in entries(spec, Layout()):
        if entry.stacked and entry.stacked[0] > 0:
            continue  # the tensors are those of the first expert
        problems += [f"mapped twice: {name}" for name in entry.hf_names if name in expected]
        expected.update(zip(entry.hf_names, entry.hf_shapes, strict=True))
        if entry.mapping.optional:
            optional.update(entry.hf_names)
    found = listing(spec.path)
    problems += found.problems
    stored, unreadable = join_parts(found.tensors, spec.quantization)
    problems += [problem for name, problem in unreadable.items() if name in expected]
    problems += [
        f"{name} is quantized, and not of the language model: an export holds such tensors as they are, and "
        "is not quantized"
        for name, tensor in stored.items()
        if isinstance(tensor, QuantizedTensor) and name.startswith(spec.mappings.passed_through)
    ]
    present = {name for name in stored if not _is_unused(name, spec)}
    problems += [
        f"missing: {name}{_why_needed(name, spec)}"
        for name in sorted(expected.keys() - present - optional - unreadable.keys())
    ]
    problems += [f"not mapped: {name}" for name in sorted(present - expected.keys())]
    problems += [
        f"{name} has shape {stored[name].shape}, config.json implies {shape}"
        for name, shape in expected.items()
        if name in present and name not in unreadable and stored[name].shape != shape
    ]
    if problems:
        problems += spec.notes
        raise HfCheckpointError(f"{spec.path} does not fit its config.json:\n  " + "\n  ".join(problems))
    return stored


def _why_needed(name: str, spec: ModelSpec) -> str:
    head = spec.mappings.head[-1]
    if spec.gives_values or name not in head.hf or head.megatron != OUTPUT:
        return ""
    return f" (config.json does not say {TIED}: true, so the head is not the embedding; set it if it is)"


def _is_unused(name: str, spec: ModelSpec) -> bool:
    """True for a head that is stored although it is tied, for any head under a value head, for multi-token
    prediction layers, and for the parts that are not of the language model.
    """
    if spec.gives_values and name.split(".")[-2:] == ["lm_head", "weight"]:
        return True
    tied_head = spec.tied_head is not None and name == spec.tied_head[0]
    return tied_head or name.startswith((*spec.mappings.passed_through, *spec.extra_prefixes))
