"""The factors of an adapter on their way between Megatron's layers and PEFT's tensors.

A fused layer has one A, which its modules share: an export repeats it for each of them. PEFT's own training
gives every module an A of its own. Such an adapter is read as well, exactly, into a layer of a larger rank:

    A = [A_q; A_k; A_v]        B_q = [B_q 0 0]        B_k = [0 B_k 0]        B_v = [0 0 B_v]
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.peft import PeftFolder
from slipstream.bridge.hf.peft_config import PeftError
from slipstream.bridge.shards.adapter import AdapterSpec, a_name, b_name


def peft_tensors(buckets: Iterable[FlatBucket | None], adapter: AdapterSpec) -> dict[str, Tensor]:
    """Return the tensors of exported buckets by PEFT's names, on the CPU. The A of a fused layer occurs
    several times, as the same tensor. Empty on a rank that is not the sender.
    """
    exported = {
        name: tensor.to("cpu", copy=True)
        for bucket in buckets
        if bucket is not None
        for name, tensor in bucket.tensors()
    }
    if not exported:
        return {}
    return {
        name(module): exported[name(source)]
        for layer in adapter.modules
        for module in layer
        for name, source in ((a_name, layer[0]), (b_name, module))
    }


def read_factors(
    folder: PeftFolder, modules: Sequence[str], outputs: Sequence[int], drawn: Tensor, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Return A and the B of each module of a layer, so that scale * B A is the folder's adapter.

    ``folder`` has passed ``adapter.check_peft``. ``outputs``: rows of each module. ``drawn``: [rank, inputs],
    the A of a new adapter, which keeps the rows that the folder does not fill; their columns of B are zero.
    Raises PeftError if the rank is too small.
    """
    present = [module for module in modules if a_name(module) in folder.names]
    blocks: list[tuple[Tensor, int]] = []
    """Each different A of the folder, and its first row in the layer's A."""
    start_of: dict[str, int] = {}
    used = 0
    for module in present:
        block = folder.tensor(a_name(module))
        start = next((start for earlier, start in blocks if torch.equal(earlier, block)), None)
        if start is None:
            start = used
            blocks.append((block, start))
            used += len(block)
        start_of[module] = start
    if used > len(drawn):
        raise PeftError(
            f"{folder.folder}: the A of {' and '.join(present)} have {used} rows together, and the layer "
            f"here has one A of {len(drawn)}; set actor.lora.rank to at least {used}"
        )
    a = drawn.clone()
    for block, start in blocks:
        a[start : start + len(block)] = block
    b: list[Tensor] = []
    for module, rows in zip(modules, outputs, strict=True):
        factor = drawn.new_zeros(rows, len(drawn))
        if module in start_of:
            columns, start = folder.tensor(b_name(module)), start_of[module]
            width = columns.shape[1]
            # Not multiplied where nothing changes: a round trip keeps every bit.
            same = folder.scale == scale
            factor[:, start : start + width] = columns if same else columns * (folder.scale / scale)
        b.append(factor)
    return a, b
