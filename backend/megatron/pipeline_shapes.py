"""The shapes that pipeline stages tell each other before they send packs of different lengths.

With two stages the next one is also the previous one, and an interleaved schedule sends in both directions at
once. Megatron then takes what comes from the one side for what comes from the other, because it lists its
sends and receives in the same order on both ranks. Tensors themselves it sends in an order that fits
(``_p2p_ops``); here shapes are sent in the same way.
"""

import torch
from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor


def install() -> None:
    p2p_communication.P2PCommunicator._communicate_shapes = _communicate_shapes


def _communicate_shapes(
    self: p2p_communication.P2PCommunicator,
    tensor_send_next: Tensor | None,
    tensor_send_prev: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
) -> tuple[list[int], list[int]]:
    """The shapes of what comes from the previous and from the next stage."""
    device = torch.cuda.current_device()

    def of(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.tensor(tensor.shape, device=device, dtype=torch.int64)

    def room(wanted: bool) -> Tensor | None:
        return torch.empty(3, device=device, dtype=torch.int64) if wanted else None

    from_prev, from_next = room(recv_prev), room(recv_next)
    to_prev, to_next = of(tensor_send_prev), of(tensor_send_next)
    requests = p2p_communication._p2p_ops(
        tensor_send_prev=to_prev,
        tensor_recv_prev=from_prev,
        tensor_send_next=to_next,
        tensor_recv_next=from_next,
        group=self.pp_group,
        prev_pipeline_rank=self.prev_rank,
        next_pipeline_rank=self.next_rank,
    )
    for request in requests.values():
        request.wait()
    return tuple([0, 0, 0] if shape is None else shape.tolist() for shape in (from_prev, from_next))
