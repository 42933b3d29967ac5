"""The LM head alone on a GPU: log-probs and entropies of 32k tokens of a vocabulary of 152k, and gradients.

    python -m benchmarks.head_on_gpu            # half a minute
    python -m benchmarks.head_on_gpu --slices   # also with other sizes of slices

``triton`` and ``chunked`` are the product's two implementations (``actor.lm_head``). ``plain`` is F.linear,
log_softmax and gather on one slice of the tokens after another, each recomputed in the backward pass
(torch.utils.checkpoint); ``compiled`` is the same slice through torch.compile; neither computes entropies.
All add the weight's gradient to a float32 buffer. *Of peak* counts three products, which any head needs, over
989 TFLOP/s: the fourth product of those that keep no logits does not count. Memory is what is allocated
beyond the operands, their gradients included.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import parser
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.backend.objective import logprob
from slipstream.backend.objective.logprob import HeadOptions, Implementation, fused_logprob_and_entropy

PEAK = 989e12
SLICE = 2048
"""Tokens of a slice of the plain head."""


@dataclass(frozen=True)
class Head:
    """Operands: bfloat16, with logits of standard deviation 2."""

    hidden_TH: Tensor
    weight_VH: Tensor
    target_T: Tensor
    grad_T: Tensor
    buffer_VH: Tensor

    @classmethod
    def random(cls, tokens: int, width: int, vocab: int) -> "Head":
        torch.manual_seed(0)
        on = {"device": "cuda", "dtype": torch.bfloat16}
        return cls(
            torch.randn(tokens, width, **on).requires_grad_(),
            (torch.randn(vocab, width, **on) * (2 / width**0.5)).requires_grad_(),
            torch.randint(vocab, (tokens,), device="cuda"),
            torch.randn(tokens, device="cuda"),
            torch.zeros(vocab, width, device="cuda"),
        )

    @property
    def product_flops(self) -> float:
        return 2.0 * self.hidden_TH.numel() * len(self.weight_VH)


def _slice_logp(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    logits_TV = F.linear(hidden_TH, weight_VH).float()
    return logits_TV.log_softmax(-1).gather(-1, target_T[:, None])[:, 0]


def plain(head: Head, slice_logp: Callable[..., Tensor] = _slice_logp) -> Tensor:
    parts = zip(head.hidden_TH.split(SLICE), head.target_T.split(SLICE), strict=True)
    return torch.cat([checkpoint(slice_logp, h, head.weight_VH, t, use_reentrant=False) for h, t in parts])  # pyright: ignore[reportArgumentType]


def product(head: Head, implementation: Implementation) -> Tensor:
    vocab = len(head.weight_VH)
    options = HeadOptions(1.0, vocab, weight_grad=head.buffer_VH, implementation=implementation)
    return fused_logprob_and_entropy(head.hidden_TH, head.weight_VH, head.target_T, options)[0]


def sliced(elements: int) -> Callable[[Head], Tensor]:
    def logp(head: Head) -> Tensor:
        logprob.SLICE_ELEMENTS["cuda"] = elements
        return product(head, "triton")

    return logp


@dataclass(frozen=True)
class Measured:
    way: str
    forward_ms: float
    both_ms: float
    of_peak: float
    extra_gb: float
    error: float
    """Largest distance of a log-prob to the plain head's."""


def milliseconds(work: Callable[[], object], turns: int = 5) -> float:
    """Return the median time of ``work`` on the GPU, after a turn that does not count."""
    took = []
    for _ in range(turns + 1):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        took.append(began.elapsed_time(ended))
    return median(took[1:])


def measure(
    head: Head, way: str, logp: Callable[[Head], Tensor], expected_T: Tensor | None
) -> tuple[Measured, Tensor]:
    def both() -> None:
        logp(head).backward(head.grad_T)
        if head.weight_VH.grad is not None:
            head.buffer_VH.add_(head.weight_VH.grad)
        head.weight_VH.grad = head.hidden_TH.grad = None

    def forward() -> Tensor:
        with torch.no_grad():
            return logp(head)

    forward_ms = milliseconds(forward)
    both()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both_ms = milliseconds(both)
    found_T = forward()
    return Measured(
        way,
        forward_ms,
        both_ms,
        3 * head.product_flops / (both_ms * 1e-3) / PEAK,
        (torch.cuda.max_memory_allocated() - held) / 1e9,
        0.0 if expected_T is None else (found_T - expected_T).abs().max().item(),
    ), found_T


def main() -> None:
    described = parser(__doc__)
    described.add_argument("--tokens", type=int, default=2**15)
    described.add_argument("--hidden", type=int, default=4096)
    described.add_argument("--vocab", type=int, default=151_936)
    described.add_argument("--slices", action="store_true", help="compare sizes of slices")
    options = described.parse_args()
    head = Head.random(options.tokens, options.hidden, options.vocab)
    compiled = torch.compile(_slice_logp)
    ways: dict[str, Callable[[Head], Tensor]] = {
        "plain": plain,
        "compiled": lambda head: plain(head, compiled),
        "chunked": lambda head: product(head, "chunked"),
        "triton": lambda head: product(head, "triton"),
    }
    if options.slices:
        ways |= {
            f"triton, slices of {2**exponent:,} logits": sliced(2**exponent) for exponent in range(25, 30)
        }
    expected_T, found = None, []
    for way, logp in ways.items():
        measured, found_T = measure(head, way, logp, expected_T)
        expected_T = found_T if expected_T is None else expected_T
        found.append(measured)
    columns: Columns[Measured] = {
        "head": lambda row: row.way,
        "forward, ms": lambda row: f"{row.forward_ms:.1f}",
        "with backward, ms": lambda row: f"{row.both_ms:.1f}",
        "of peak": lambda row: f"{row.of_peak:.2f}",
        "memory, GB": lambda row: f"{row.extra_gb:.2f}",
        "error": lambda row: f"{row.error:.1e}",
    }
    table_console().print(rows_table(torch.cuda.get_device_name(), found, columns))
    print(json.dumps([vars(row) for row in found]))


if __name__ == "__main__":
    main()
