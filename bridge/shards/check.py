"""Compare an HF checkpoint with its config, by names and shapes. Imports no torch."""

from slipstream.bridge.hf.index import HfCheckpointError, StoredTensor, stored_tensors
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import entries


def check_tensors(spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return the checkpoint's tensors by name: each is mapped once and has the expected shape.

    Raises HfCheckpointError with all tensors that are missing, not mapped or of another shape.
    """
    expected: dict[str, tuple[int, ...]] = {}
    optional: set[str] = set()
    problems: list[str] = []
    for entry in entries(spec, Layout()):
        problems += [f"mapped twice: {name}" for name in entry.hf_names if name in expected]
        expected.update(zip(entry.hf_names, entry.hf_shapes, strict=True))
        if entry.mapping.optional:
            optional.update(entry.hf_names)
    stored = stored_tensors(spec.path)
    present = {name for name in stored if not _is_unused(name, spec)}
    problems += [f"missing: {name}" for name in sorted(expected.keys() - present - optional)]
    problems += [f"not mapped: {name}" for name in sorted(present - expected.keys())]
    problems += [
        f"{name} has shape {stored[name].shape}, config.json implies {shape}"
        for name, shape in expected.items()
        if name in present and stored[name].shape != shape
    ]
    if problems:
        raise HfCheckpointError(f"{spec.path} does not fit its config.json:\n  " + "\n  ".join(problems))
    return stored


def _is_unused(name: str, spec: ModelSpec) -> bool:
    """True for the head of tied embeddings or under a value head, and for multi-token prediction layers."""
    geometry = spec.geometry
    extra = range(geometry.n_layers, geometry.n_layers + geometry.extra_layers)
    no_head = geometry.tied_embeddings or spec.gives_values
    return (no_head and name == "lm_head.weight") or any(
        name.startswith(f"model.layers.{layer}.") for layer in extra
    )
