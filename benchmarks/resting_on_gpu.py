"""Rates at which a colocated trainer gives up the memory of a GPU and takes it back, in GB/s.

    python -m benchmarks.resting_on_gpu          # 8 GB of weights and optimizer state, ten seconds

``resting`` is the trainer's own (``slipstream.backend.megatron.resting``): pinned host memory that is kept
from one rest to the next. Its first rest also allocates that memory. ``pageable`` copies the same tensors
with ``Tensor.cpu()`` and back. The limit is the GPU's link to the host: 64 GB/s in each direction for PCIe 5.
"""

import json
import time
from collections.abc import Callable

import torch

from benchmarks.harness import parser
from slipstream.backend.megatron.resting import Resting
from slipstream.backend.monitor.tables import pairs_table, table_console


def rate(nbytes: int, work: Callable[[], object]) -> float:
    """Return GB/s of ``work`` that moves ``nbytes``."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return nbytes / (time.perf_counter() - began) / 1e9


def main() -> None:
    described = parser(__doc__)
    described.add_argument("--gigabytes", type=float, default=8.0)
    options = described.parse_args()
    tensors = [torch.randn(2**26, device="cuda") for _ in range(int(options.gigabytes * 1e9 / 2**28))]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    before = [tensor.sum().item() for tensor in tensors]
    resting = Resting(torch.device("cuda"))
    rates = {}
    for turn in ("first", "second", "third"):
        rates[f"resting, {turn}"] = rate(nbytes, lambda: resting.rest(tensors))
        rates[f"waking, {turn}"] = rate(nbytes, resting.wake)
    assert before == [tensor.sum().item() for tensor in tensors]
    host = []
    rates["pageable, to the host"] = rate(nbytes, lambda: host.extend(tensor.cpu() for tensor in tensors))
    rates["pageable, back"] = rate(
        nbytes, lambda: [tensor.copy_(held) for tensor, held in zip(tensors, host, strict=True)]
    )
    figures = {name: f"{value:.1f} GB/s" for name, value in rates.items()}
    table_console().print(pairs_table(f"{nbytes / 1e9:.1f} GB on {torch.cuda.get_device_name()}", figures))
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
