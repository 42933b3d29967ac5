"""Trace SGLang's loader: where does it put the elements of each HF tensor?

The model's own ``load_weights`` runs once on tensors that hold nothing. Whatever it does with views, chunks
or ``cat`` ends in ``copy_`` into a view of a parameter, which is noted and not done. So no table of fused
names is kept here. A loader that does more than moving elements (one that quantizes, say) is refused by name:
``Untraceable``.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from slipstream.bridge.model.mapping import Shape
from slipstream.bridge.shards.regions import Region, contiguous


class Untraceable(RuntimeError):
    """The engine's loader does more than moving the elements of this tensor."""


class Loader(Protocol):
    """A model of SGLang."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object: ...


@dataclass(frozen=True)
class Wanted:
    """An HF tensor that is going to be published."""

    name: str
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class _Copy:
    """One ``copy_`` of the loader."""

    root: str
    view: Tensor
    """The view of the root that is copied, on the device ``meta``."""
    target: Tensor


@dataclass(frozen=True)
class _Part:
    """A part of a concatenation."""

    tensor: "Traced"
    start: int
    dim: int


class _Notes:
    """The copies and concatenations of one run of the loader. Loaders copy in several threads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies: list[_Copy] = []
        self.shapes: dict[str, Shape] = {}
        self.joints: dict[str, list[_Part]] = {}
        """The parts of each concatenation. Its name begins with ``~``."""
        self.zeroed: set[str] = set()
        """Roots that the loader has set to zero: a bias that is added by another rank."""
        self.zeros: list[Tensor] = []
        """Targets of their copies."""
        self.lock = threading.Lock()

    def root(self, wanted: Wanted) -> "Traced":
        self.shapes[wanted.name] = wanted.shape
        return Traced(torch.empty(wanted.shape, dtype=wanted.dtype, device="meta"), wanted.name, self)


class Traced(Tensor):
    """A view of an HF tensor that has a shape and strides, and no elements."""

    meta: Tensor
    root: str
    notes: _Notes

    @staticmethod
    def __new__(cls: type["Traced"], meta: Tensor, root: str, notes: _Notes) -> "Traced":
        self = Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=int(meta.storage_offset()),
            dtype=meta.dtype,
            device=notes.device,
            requires_grad=False,
        )
        self.meta, self.root, self.notes = meta, root, notes
        return self

    def __init__(self, meta: Tensor, root: str, notes: _Notes) -> None:
        """Do nothing: ``__new__`` has set the attributes."""

    def __repr__(self, **_: object) -> str:
        return f"Traced({self.root}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func.overloadpacket._qualified_op_name
        source = args[0]
        if name == "aten::copy_" and isinstance(args[1], Traced) and not isinstance(source, Traced):
            return args[1]._copied_to(source)
        if name == "aten::zero_" and isinstance(source, Traced):
            return source._set_to_zero()
        if name == "aten::cat":
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return _concatenated(cast("Sequence[Tensor]", source), cast(int, dim))
        traced = [arg for arg in args if isinstance(arg, Traced)]
        if len(traced) == 1 and traced[0] is source:
            if name in ("aten::clone", "aten::_to_copy", "aten::lift_fresh"):
                if kwargs.get("dtype", source.dtype) not in (None, source.dtype):
                    raise Untraceable(f"{source.root} is converted to {kwargs['dtype']}")
                return Traced(source.meta, source.root, source.notes)
            if func.is_view:
                views = func(source.meta, *args[1:], **kwargs)
                if isinstance(views, list | tuple):
                    return [
                        Traced(view, source.root, source.notes) for view in cast("Sequence[Tensor]", views)
                    ]
                return Traced(views, source.root, source.notes)
        roots = ", ".join(one.root for one in traced) or str(source)
        raise Untraceable(f"the loader calls {name} on {roots}")

    def _copied_to(self, target: Tensor) -> Tensor:
        if target.shape != self.shape:
            raise Untraceable(f"{self.root}: {tuple(self.shape)} is broadcast into {tuple(target.shape)}")
        with self.notes.lock:
            if self.root in self.notes.zeroed:
                self.notes.zeros.append(target.zero_())
            else:
                self.notes.copies.append(_Copy(self.root, self.meta, target))
        return target

    def _set_to_zero(self) -> "Traced":
        notes = self.notes
        with notes.lock:
            is_whole = self.numel() == prod(notes.shapes[self.root])
            if not is_whole or any(copy.root == self.root for copy in notes.copies):
                raise Untraceable(f"{self.root} is set to zero in part, or after it was copied")
            notes.zeroed.add(self.root)
        return self


def _concatenated(parts: Sequence[Tensor], dim: int) -> Traced:
    traced = [part for part in parts if isinstance(part, Traced)]
    if len(traced) < len(parts):
        raise Untraceable(f"{traced[0].root} is concatenated with a tensor that is not published")
    notes, shape = traced[0].notes, list(traced[0].shape)
    if zeroed := [part.root for part in traced if part.root in notes.zeroed]:
        raise Untraceable(f"{zeroed[0]} is set to zero and concatenated")
    dim %= len(shape)
    starts = [sum(part.shape[dim] for part in traced[:number]) for number in range(len(traced))]
    shape[dim] = sum(part.shape[dim] for part in traced)
    with notes.lock:
        name = f"~{len(notes.joints)}"
        notes.joints[name] = [_Part(part, start, dim) for part, start in zip(traced, starts, strict=True)]
        notes.shapes[name] = tuple(shape)
    return Traced(torch.empty(shape, dtype=traced[0].dtype, device="meta"), name, notes)


@dataclass(frozen=True)
class _Rectangle:
    """A rectangle of a root, and for each of its dimensions the dimension of the view that runs along it."""

    start: Shape
    size: Shape
    step: Shape
    along: tuple[int | None, ...]


def _rectangle(view: Tensor, shape: Shape, name: str) -> _Rectangle:
    """Return the rectangle of a tensor of ``shape`` that ``view`` shows. Raises Untraceable."""
    strides, rest = contiguous(shape), int(view.storage_offset())
    start: list[int] = []
    for stride, length in zip(strides, shape, strict=True):
        start.append(rest // stride if length > 1 else 0)
        rest -= start[-1] * stride
    size, step = [1] * len(shape), [1] * len(shape)
    along = list[int | None]([None] * len(shape))
    for view_dim, (length, steps) in enumerate(zip(view.shape, view.stride(), strict=True)):
        if length == 1:
            continue
        dims = [
            dim
            for dim, (stride, n) in enumerate(zip(strides, shape, strict=True))
            if steps >= stride and steps % stride == 0 and start[dim] + (length - 1) * (steps // stride) < n
        ]
        if not dims or along[dims[0]] is not None:
            raise Untraceable(f"{name}: a view of {tuple(view.shape)} is no rectangle of {shape}")
        dim = dims[0]
        size[dim], step[dim], along[dim] = length, steps // strides[dim], view_dim
    return _Rectangle(tuple(start), tuple(size), tuple(step), tuple(along))


@dataclass(frozen=True)
class EngineTable:
    """The places of the HF tensors' elements in the parameters of one engine rank."""

    regions: list[Region]
    filled: dict[str, int]
    """Number of elements of each parameter that the regions fill, if it is not all of them."""


def trace(model: torch.nn.Module, wanted: Iterable[Wanted]) -> EngineTable:
    """Return where ``model``, a model of SGLang, puts the elements of ``wanted``. Raises Untraceable.

    The parameters keep their values, except that a loader may fill padding with zeros, as it does in a load,
    and parameters that other ranks of the engine have the values of.
    """
    notes = _Notes(next(model.parameters()).device)
    owners: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        owners.setdefault(_memory(tensor), (name, tensor))
    # What is derived from the weights cannot be derived from tensors that hold nothing.
    vars(model)["post_load_weights"] = lambda *_, **__: None  # pyright: ignore[reportUnknownLambdaType]
    try:
        with torch.no_grad():
            cast(Loader, model).load_weights([(each.name, notes.root(each)) for each in wanted])
    finally:
        del vars(model)["post_load_weights"]
    regions: list[Region] = []
    for copy in notes.copies:
        regions += _regions(notes, copy, owners)
    filled = Counter[str]()
    for region in regions:
        filled[region.tensor] += prod(region.size)
    for target in notes.zeros:
        filled[_owner(target, owners)[0]] += target.numel()
    return EngineTable(
        regions,
        {
            name: filled[name]
            for name, parameter in model.named_parameters()
            if filled[name] != parameter.numel()
        },
    )


def _memory(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common: on the device ``meta``, memory has no address."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _owner(target: Tensor, owners: dict[int, tuple[str, Tensor]]) -> tuple[str, Tensor]:
    """Return the parameter whose memory ``target`` is in, with its name; no name: none."""
    return owners.get(_memory(target), ("", target))


def _regions(notes: _Notes, copy: _Copy, owners: dict[int, tuple[str, Tensor]]) -> list[Region]:
    target = copy.target
    name, owner = _owner(target, owners)
    if not name:
        raise Untraceable(f"{copy.root} is copied into a tensor that is no parameter of the model")
    if torch.promote_types(copy.view.dtype, target.dtype) != target.dtype:
        raise Untraceable(f"{copy.root} is {copy.view.dtype}, but the engine holds {name} as {target.dtype}")
    rectangle = _rectangle(copy.view, notes.shapes[copy.root], copy.root)
    steps = target.stride()
    stride = tuple(0 if dim is None else steps[dim] for dim in rectangle.along)
    offset = int(target.storage_offset()) - int(owner.storage_offset())
    return _resolved(
        notes,
        Region(copy.root, rectangle.start, rectangle.size, name, offset, stride, rectangle.step),
        copy.root,
    )


def _resolved(notes: _Notes, region: Region, name: str) -> list[Region]:
    """Return a region of a concatenation as regions of its parts."""
    if region.hf not in notes.joints:
        return [region]
    if any(step != 1 for step in region.step):
        raise Untraceable(f"{name}: every other element of a concatenation is taken")
    result: list[Region] = []
    for part in notes.joints[region.hf]:
        dim, traced = part.dim, part.tensor
        low = max(region.start[dim], part.start)
        high = min(region.start[dim] + region.size[dim], part.start + traced.shape[dim])
        if high <= low:
            continue
        inner = _rectangle(traced.meta, notes.shapes[traced.root], name)
        start, size, stride = list(inner.start), list(inner.size), list[int]([0] * len(inner.start))
        for root_dim, view_dim in enumerate(inner.along):
            if view_dim is None:
                continue
            first, length = (
                (low - part.start, high - low)
                if view_dim == dim
                else (region.start[view_dim], region.size[view_dim])
            )
            start[root_dim] += first * inner.step[root_dim]
            size[root_dim] = length
            stride[root_dim] = region.stride[view_dim]
        offset = region.offset + (low - region.start[dim]) * region.stride[dim]
        result += _resolved(
            notes,
            Region(traced.root, tuple(start), tuple(size), region.tensor, offset, tuple(stride), inner.step),
            name,
        )
    return result
