"""Do an HF config, its mapping, a layout and the checkpoint's files fit together? Imports no torch."""

from slipstream.bridge.families import ModelSpec
from slipstream.bridge.hf_index import HfCheckpointError, StoredTensor, stored_tensors
from slipstream.bridge.layout import Layout
from slipstream.bridge.plan import entries


def check_names(spec: ModelSpec) -> dict[str, StoredTensor]:
    """The checkpoint's tensors, each mapped once and of the expected shape. Raises HfCheckpointError."""
    expected: dict[str, tuple[int, ...]] = {}
    optional: set[str] = set()
    problems = []
    for entry in entries(spec, Layout()):
        problems += [f"mapped twice: {name}" for name in entry.hf_names if name in expected]
        expected.update(zip(entry.hf_names, entry.hf_shapes, strict=True))
        if entry.mapping.optional:
            optional.update(entry.hf_names)
    stored = stored_tensors(spec.path)
    found = {name for name in stored if not _is_passed_over(name, spec)}
    problems += [f"missing: {name}" for name in sorted(expected.keys() - found - optional)]
    problems += [f"not mapped: {name}" for name in sorted(found - expected.keys())]
    problems += [
        f"{name} has shape {stored[name].shape}, config.json means {shape}"
        for name, shape in expected.items()
        if name in found and stored[name].shape != shape
    ]
    if problems:
        raise HfCheckpointError(f"{spec.path} does not fit its config.json:\n  " + "\n  ".join(problems))
    return stored


def _is_passed_over(name: str, spec: ModelSpec) -> bool:
    """The head of tied embeddings or of logits that are not wanted, and layers for multi-token prediction."""
    geometry = spec.geometry
    extra = range(geometry.n_layers, geometry.n_layers + geometry.extra_layers)
    no_head = geometry.tied_embeddings or spec.gives_values
    return (no_head and name == "lm_head.weight") or any(
        name.startswith(f"model.layers.{layer}.") for layer in extra
    )
