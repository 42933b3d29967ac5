"""Fused kernels: which ones a trainer's layers and its LM head use, and why.

The one place of these decisions. Each is a pure function of the model, of the layer spec and of the machine;
none depends on the parallel layout, because every kernel here takes packs that context-parallel ranks share.

    apply_rope_fusion        rotary embeddings of queries and keys as one kernel each
    bias_activation_fusion   SwiGLU as one compiled kernel forward and one backward, which keeps its input
    moe_permute_fusion       the permutation of tokens by expert as one kernel

Megatron's ``gradient_accumulation_fusion`` stays off: its LM head asks for Apex then.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.backend.objective.logprob import Implementation
from slipstream.bridge.model.geometry import Geometry, LatentAttention
from slipstream.bridge.model.layout import LayerSpec
from slipstream.configs.schema import ActorConfig


@dataclass(frozen=True)
class KernelSupport:
    """The properties of a trainer's machine that decide about kernels."""

    has_gpu: bool
    has_transformer_engine: bool
    has_triton: bool

    @classmethod
    def present(cls) -> "KernelSupport":
        """Return the properties of this machine."""
        import torch

        return cls(
            torch.cuda.is_available(),
            *(importlib.util.find_spec(name) is not None for name in ("transformer_engine", "triton")),
        )


@dataclass(frozen=True)
class Fusion:
    """The decision about one kernel."""

    on: bool
    reason: str


def fusions(geometry: Geometry, layer_spec: LayerSpec, machine: KernelSupport) -> dict[str, Fusion]:
    """Return the decision about each of Megatron's fusions, by the name of its setting."""
    return {
        "apply_rope_fusion": _rope(geometry, layer_spec, machine),
        "bias_activation_fusion": _activation(geometry, machine),
        "moe_permute_fusion": _permutation(geometry, layer_spec, machine),
    }


def chosen_fusions(
    geometry: Geometry, layer_spec: LayerSpec, machine: KernelSupport, overrides: Mapping[str, object]
) -> dict[str, bool]:
    """Return the value of each of Megatron's fusion settings. ``overrides``: the recipe's ``actor.megatron``.

    Raises ValueError if the recipe turns on a fusion that is not possible.
    """
    decisions = fusions(geometry, layer_spec, machine)
    wrong = [
        f"actor.megatron.{name} is true, but {decision.reason}; leave it out"
        for name, decision in decisions.items()
        if overrides.get(name) and not decision.on
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    return {name: decision.on for name, decision in decisions.items()}


def head_implementation(actor: ActorConfig, machine: KernelSupport) -> Implementation:
    """Return the implementation of the LM head that ``actor.lm_head`` names.

    Raises ValueError for Triton's kernels on a machine that cannot run them.
    """
    possible = machine.has_gpu and machine.has_triton
    if actor.lm_head == "auto":
        return "triton" if possible else "chunked"
    if actor.lm_head == "triton" and not possible:
        missing = "the package triton is not installed" if machine.has_gpu else "there is no GPU"
        raise ValueError(f"actor.lm_head is triton, but {missing}: set it to auto or chunked")
    return actor.lm_head


def _rope(geometry: Geometry, layer_spec: LayerSpec, machine: KernelSupport) -> Fusion:
    absent = _without_engine(layer_spec, machine)
    if absent is not None:
        return absent
    yarn = geometry.rope.kind == "yarn"
    if not isinstance(geometry.attention, LatentAttention):
        if yarn:
            return Fusion(False, "the kernel for packs leaves out the factor of YaRN's cosines and sines")
        if geometry.rope.interleaved:
            return Fusion(False, "Megatron's kernel for packs rotates dimensions that are half a head apart")
        return Fusion(True, "Transformer Engine has a kernel for packs")
    if not yarn:
        return Fusion(False, "Megatron's kernel for latent attention takes YaRN alone")
    if not machine.has_triton:
        return Fusion(False, "Megatron's kernel for latent attention needs the package triton")
    attention = geometry.attention
    sizes = (attention.plain_dim, attention.rotated_dim, attention.value_dim)
    if any(size & (size - 1) for size in sizes):
        return Fusion(
            False,
            "Megatron's kernel for latent attention takes heads of powers of two alone, and the model's have "
            f"{attention.plain_dim} plain, {attention.rotated_dim} rotated and {attention.value_dim} value "
            "dimensions",
        )
    return Fusion(True, "Megatron has a kernel for latent attention with YaRN")


def _activation(geometry: Geometry, machine: KernelSupport) -> Fusion:
    if geometry.activation != "swiglu" or geometry.linear_biases:
        return Fusion(False, "the kernel is for SwiGLU without biases")
    if not machine.has_gpu:
        return Fusion(False, "there is no GPU")
    if not machine.has_triton:
        return Fusion(False, "torch compiles the kernel with the package triton, which is not installed")
    return Fusion(True, "the model has SwiGLU without biases")


def _permutation(geometry: Geometry, layer_spec: LayerSpec, machine: KernelSupport) -> Fusion:
    if geometry.experts is None:
        return Fusion(False, "the model has no experts")
    absent = _without_engine(layer_spec, machine)
    return absent or Fusion(True, "Transformer Engine has a kernel")


def _without_engine(layer_spec: LayerSpec, machine: KernelSupport) -> Fusion | None:
    """Return the decision against a kernel of Transformer Engine where it cannot be used."""
    if not machine.has_gpu:
        return Fusion(False, "there is no GPU")
    if not machine.has_transformer_engine:
        return Fusion(False, "Transformer Engine is not installed")
    if layer_spec != "transformer_engine":
        return Fusion(False, "the layers are of the local spec, which is plain PyTorch")
    return None
