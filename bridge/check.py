"""Do an HF config, its mapping, a layout and the checkpoint's files fit together? Imports no torch."""

from bridge.families import ModelSpec
from bridge.hf_index import CheckpointError, StoredTensor, stored_tensors
from bridge.layout import Layout
from bridge.plan import entries


def check_names(spec: ModelSpec) -> dict[str, StoredTensor]:
    """The checkpoint's tensors: every one is mapped once, with the expected shape. Raises CheckpointError."""
    expected: dict[str, tuple[int, ...]] = {}
    problems = []
    for entry in entries(spec, Layout()):
        problems += [f"mapped twice: {name}" for name in entry.hf_names if name in expected]
        expected.update(zip(entry.hf_names, entry.hf_shapes, strict=True))
    stored = stored_tensors(spec.path)
    found = {name for name in stored if not _is_passed_over(name, spec)}
    problems += [f"missing: {name}" for name in sorted(expected.keys() - found)]
    problems += [f"not mapped: {name}" for name in sorted(found - expected.keys())]
    problems += [
        f"{name} has shape {stored[name].shape}, config.json means {shape}"
        for name, shape in expected.items()
        if name in found and stored[name].shape != shape
    ]
    if problems:
        raise CheckpointError(f"{spec.path} does not fit its config.json:\n  " + "\n  ".join(problems))
    return stored


def _is_passed_over(name: str, spec: ModelSpec) -> bool:
    """The head of tied embeddings, and layers for multi-token prediction, which are not trained."""
    geometry = spec.geometry
    extra = range(geometry.n_layers, geometry.n_layers + geometry.extra_layers)
    return (geometry.tied_embeddings and name == "lm_head.weight") or any(
        name.startswith(f"model.layers.{layer}.") for layer in extra
    )
