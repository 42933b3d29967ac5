"""Low-rank adapters in the terms of the bridge: which layers have one, and where its factors are in HF.

    y = W x + alpha / rank * B (A x)        W [outputs, inputs], A [rank, inputs], B [outputs, rank]

A linear layer of Megatron has one A and one B. If it fuses several HF modules (query, key and value; gate and
up), they share A, and each of them has its own rows of B.

An adapter is a model of its own: ``adapter_spec`` gives it mappings, with which everything that moves weights
moves factors. Imports no torch.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from slipstream.bridge.hf.peft_config import PeftError, PeftIndex, peft_config
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.mapping import (
    Columns,
    Mapping,
    Mappings,
    Rows,
    Runs,
    Shape,
    Split,
    Whole,
)
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import entries

PEFT_PREFIX = "base_model.model."
"""Prefix of the names of modules in PEFT's files."""

MOST_PROBLEMS = 4
"""Number of problems of an adapter that a message lists."""


class NoAdapter(ValueError):
    """A layer cannot have an adapter; the message names it."""


@dataclass(frozen=True)
class AdapterSpec:
    """The adapter of a model."""

    factors: ModelSpec
    """Maps the factors that Megatron holds to tensors by PEFT's names. The A that several modules share has
    the name of the first one's."""
    modules: tuple[tuple[str, ...], ...]
    """HF modules of each adapted layer, in the order of the forward pass."""
    shapes: tuple[tuple[Shape, ...], ...]
    """Shapes of the weights of these modules."""
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """Factor of the product of B and A."""
        return self.alpha / self.rank

    @property
    def leaves(self) -> list[str]:
        """Last parts of the names of all adapted modules, sorted."""
        return sorted({module.rpartition(".")[2] for layer in self.modules for module in layer})


def a_name(module: str) -> str:
    """Return PEFT's name of a module's A.

    >>> a_name("model.layers.0.self_attn.q_proj")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return f"{PEFT_PREFIX}{module}.lora_A.weight"


def b_name(module: str) -> str:
    """Return PEFT's name of a module's B."""
    return f"{PEFT_PREFIX}{module}.lora_B.weight"


def linear_layer(parameter: str) -> str | None:
    """Return the name of a weight's linear layer in the decoder; None for any other parameter.

    >>> linear_layer("decoder.layers.0.mlp.linear_fc1.weight")
    'linear_fc1'
    """
    module, _, kind = parameter.rpartition(".")
    layer = module.rpartition(".")[2]
    is_linear = layer.startswith("linear_") or layer in ("in_proj", "out_proj")
    return layer if kind == "weight" and is_linear else None


def is_adapted(parameter: str, targets: Collection[str] | None) -> bool:
    """True if the parameter is the weight of a layer in ``targets``; None: of any linear layer."""
    layer = linear_layer(parameter)
    return layer is not None and (targets is None or layer in targets)


def modules_of(hf_names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the HF modules whose weights have these names."""
    return tuple(name.removesuffix(".weight") for name in hf_names)


def factor_splits(split: Split, rank: int) -> tuple[Split, Split]:
    """Return how ranks share A and B of a layer whose weight they share by ``split``."""
    match split:
        case Columns(rows, columns, label):
            return Columns(rank, columns, label), Whole((rows, rank))
        case Rows(columns=int(columns)):
            return Whole((rank, columns)), replace(split, columns=rank)
        case Runs(hf_shapes=shapes):
            return Whole((rank, shapes[0][1])), replace(
                split, hf_shapes=tuple((rows, rank) for rows, *_ in shapes)
            )
        case Whole((rows, columns)):
            return Whole((rank, columns)), Whole((rows, rank))
        case _:
            raise NoAdapter(f"a weight that is shared by {split} cannot have an adapter")


def peft_config_of(adapter: AdapterSpec, base: str) -> dict[str, object]:
    """Return the fields of PEFT's LoraConfig for an adapter of the model at ``base``."""
    return peft_config(rank=adapter.rank, alpha=adapter.alpha, leaves=adapter.leaves, base=base)


def adapter_spec(spec: ModelSpec, *, rank: int, alpha: float, targets: Collection[str] | None) -> AdapterSpec:
    """Return the adapter of the layers of ``spec`` that ``targets`` names; None: of all linear layers."""
    layers = tuple(
        tuple(
            factor
            for mapping in layer
            if is_adapted(mapping.megatron, targets)
            for factor in _factors(mapping, rank)
        )
        for layer in spec.mappings.layers
    )
    # The factors of a tied embedding do not exist, although the embedding is held twice.
    geometry = replace(spec.geometry, tied_embeddings=False)
    factors = ModelSpec(spec.path, geometry, Mappings(embedding=(), layers=layers, head=()))
    adapted = [entry for entry in entries(spec, Layout()) if is_adapted(entry.parameter, targets)]
    return AdapterSpec(
        factors,
        tuple(modules_of(entry.hf_names) for entry in adapted),
        tuple(entry.hf_shapes for entry in adapted),
        rank,
        alpha,
    )


def check_peft(index: PeftIndex, adapter: AdapterSpec) -> None:
    """Raise PeftError unless every tensor belongs to an adapted layer, has its shape, and fits its rank."""
    unused, problems = set(index.names), list[str]()
    for layer, shapes in zip(adapter.modules, adapter.shapes, strict=True):
        for module, (rows, columns) in zip(layer, shapes, strict=True):
            names = {a_name(module), b_name(module)}
            unused -= names
            if missing := names - index.names:
                if len(missing) == 1:
                    problems.append(f"{missing.pop()} is missing")
                continue
            a, b = index.shape(a_name(module)), index.shape(b_name(module))
            if len(a) != 2 or a[1] != columns or b != (rows, a[0]):
                problems.append(f"{module} has A {a} and B {b}, expected (r, {columns}) and ({rows}, r)")
            elif a[0] > adapter.rank:
                problems.append(
                    f"{module} has rank {a[0]}; set actor.lora.rank to at least that (it is {adapter.rank})"
                )
    problems += [f"{name}: no adapted layer has it" for name in sorted(unused)]
    if problems:
        more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise PeftError(
            f"{index.folder} does not fit the layers of actor.lora.targets, which hold "
            f"{', '.join(adapter.leaves)}: {'; '.join(problems[:MOST_PROBLEMS])}{more}"
        )


def _factors(mapping: Mapping, rank: int) -> tuple[Mapping, Mapping]:
    """Return the mappings of A and B of one layer."""
    if mapping.stacked:
        raise NoAdapter(
            "experts whose weights HF stacks in one tensor cannot have adapters; set actor.lora.targets "
            "to [linear_qkv, linear_proj] or one of them"
        )
    a_split, b_split = factor_splits(mapping.split, rank)
    modules, prefix = modules_of(mapping.hf), mapping.megatron.removesuffix("weight")
    return (
        replace(mapping, megatron=f"{prefix}lora_a", hf=(a_name(modules[0]),), split=a_split, te=None),
        replace(mapping, megatron=f"{prefix}lora_b", hf=tuple(map(b_name, modules)), split=b_split, te=None),
    )
