"""The shapes that pipeline stages send each other before they send packs of different lengths.

With two stages the next stage is also the previous one, and an interleaved schedule sends in both directions
at once. Megatron lists its sends and receives of shapes in the same order on both ranks, so that a shape from
one side is taken for one from the other. It sends the tensors themselves in an order that fits
(``_p2p_ops``); here shapes are sent the same way.
"""

import torch
from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor


def install() -> None:
    """Replace Megatron's exchange of shapes."""
    p2p_communication.P2PCommunicator._communicate_shapes = _communicate_shapes


def _communicate_shapes(
    self: p2p_communication.P2PCommunicator,
    tensor_send_next: Tensor | None,
    tensor_send_prev: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
) -> tuple[list[int], list[int]]:
    """Return the shapes of the tensors that come from the previous and from the next stage."""
    device = torch.cuda.current_device()

    def shape_of(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.tensor(tensor.shape, device=device, dtype=torch.int64)

    def room(receives: bool) -> Tensor | None:
        return torch.empty(3, device=device, dtype=torch.int64) if receives else None

    def numbers(shape: Tensor | None) -> list[int]:
        return [0, 0, 0] if shape is None else shape.tolist()

    from_prev, from_next = room(recv_prev), room(recv_next)
    assert self.prev_rank is not None and self.next_rank is not None
    requests = p2p_communication._p2p_ops(
        tensor_send_prev=shape_of(tensor_send_prev),
        tensor_recv_prev=from_prev,
        tensor_send_next=shape_of(tensor_send_next),
        tensor_recv_next=from_next,
        group=self.pp_group,
        prev_pipeline_rank=self.prev_rank,
        next_pipeline_rank=self.next_rank,
    )
    for request in requests.values():
        request.wait()
    return numbers(from_prev), numbers(from_next)
