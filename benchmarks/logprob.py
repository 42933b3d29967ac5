"""Log-probs of 1,024 tokens of a vocabulary of 151,936, forward and backward, against the plain formula.

    python -m benchmarks.logprob           # five to fifteen minutes, 9 GB

From hidden states: ``fused_logprob`` against LM head, log_softmax and gather, with the shape of Qwen3-1.7B's
head. The weight's gradient is added to an existing float32 buffer, as in Megatron's DDP. From logits N(0, 2):
``vocab_parallel_logprob`` against log_softmax and gather. Only our side also computes the entropy.

Each side has a process of its own, and they take turns. Times are the fastest of all turns, by the clock and
of the CPU. On a machine with other work only CPU times are repeatable, best with one thread (--threads 1),
because threads that wait for each other use CPU time. Memory is the growth of the resident size to its peak
(VmHWM) in a side's first turn, before its allocator has memory to use again.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.given_logits import vocab_parallel_logprob
from benchmarks.harness import Turn, parser, peak_mb, reset_peak, take_turns
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.backend.objective.logprob import HeadOptions, fused_logprob, fused_logprob_and_entropy

TOKENS, HIDDEN, VOCAB = 1024, 2048, 151936
SCALE = 2.0
CHECKED = 64
"""Number of tokens that are compared with float64."""
ASKED = {"time_ratio": 0.8, "memory_ratio": 0.15}


@dataclass
class Inputs:
    hidden_TH: Tensor
    weight_VH: Tensor
    target_T: Tensor
    grad_T: Tensor
    buffer_VH: Tensor
    logits_TV: Tensor


def inputs(dtype: torch.dtype, tokens: int, *, logits: bool) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    none = torch.empty(0)
    weight = none if logits else torch.empty(VOCAB, HIDDEN, dtype=dtype)
    for part in weight.split(4096):
        part.copy_(torch.randn(part.shape, generator=generator).mul_(SCALE / HIDDEN**0.5))
    given = torch.empty(tokens, VOCAB, dtype=dtype) if logits else none
    for row in given:
        row.copy_(torch.randn(VOCAB, generator=generator).mul_(SCALE))
    return Inputs(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randint(VOCAB, (tokens,), generator=generator),
        torch.randn(tokens, generator=generator),
        none if logits else torch.ones(VOCAB, HIDDEN),
        given.requires_grad_(),
    )


def plain(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    return logits_TV.float().log_softmax(-1).gather(-1, target_T[:, None])[:, 0]


def plain_head(x: Inputs) -> None:
    plain(F.linear(x.hidden_TH, x.weight_VH), x.target_T).backward(x.grad_T)
    assert x.weight_VH.grad is not None
    x.buffer_VH.add_(x.weight_VH.grad)
    x.weight_VH.grad = x.hidden_TH.grad = None


def fused_head(x: Inputs, *, float32_logits: bool = False) -> None:
    options = HeadOptions(1.0, VOCAB, float32_logits=float32_logits, weight_grad=x.buffer_VH)
    logp_T, _ = fused_logprob_and_entropy(x.hidden_TH, x.weight_VH, x.target_T, options)
    logp_T.backward(x.grad_T)
    x.hidden_TH.grad = None


def fused_float32_head(x: Inputs) -> None:
    fused_head(x, float32_logits=True)


def plain_logits(x: Inputs) -> None:
    torch.autograd.grad(plain(x.logits_TV, x.target_T), x.logits_TV, x.grad_T)


def given_logits(x: Inputs, *, overwrite: bool = False) -> None:
    logp_T, _ = vocab_parallel_logprob(
        x.logits_TV, x.target_T, temperature=1.0, vocab=VOCAB, overwrite=overwrite
    )
    torch.autograd.grad(logp_T, x.logits_TV, x.grad_T)


def overwritten_logits(x: Inputs) -> None:
    given_logits(x, overwrite=True)


CASES: dict[str, tuple[Callable[[Inputs], None], Callable[[Inputs], None]]] = {
    "head": (plain_head, fused_head),
    "float32 head": (plain_head, fused_float32_head),
    "logits": (plain_logits, given_logits),
    "logits, overwritten": (plain_logits, overwritten_logits),
}
"""The plain side and our side, by name."""


def side(work: Callable[[Inputs], None], dtype: torch.dtype) -> tuple[str, Callable[[int], float]]:
    """Set up one side for ``take_turns``. Each turn returns the growth of the resident size in MB."""
    x = inputs(dtype, TOKENS, logits="logits" in work.__name__)
    few = slice(0, 8)
    part = replace(
        x,
        hidden_TH=x.hidden_TH[few].detach().requires_grad_(),
        logits_TV=x.logits_TV[few].detach().clone().requires_grad_(),
        target_T=x.target_T[few],
        grad_T=x.grad_T[few],
    )
    work(part)  # libraries load parts of themselves at the first use

    def turn(number: int) -> float:
        before = reset_peak()
        work(x)
        return peak_mb() - before

    return work.__name__, turn


@dataclass(frozen=True)
class Row:
    """Fastest times and memory of the two sides of one case."""

    case: str
    plain: Sequence[Turn[float]]
    ours: Sequence[Turn[float]]

    @property
    def plain_s(self) -> float:
        return min(turn.seconds for turn in self.plain)

    @property
    def ours_s(self) -> float:
        return min(turn.seconds for turn in self.ours)

    @property
    def plain_cpu_s(self) -> float:
        return min(turn.cpu_seconds for turn in self.plain)

    @property
    def ours_cpu_s(self) -> float:
        return min(turn.cpu_seconds for turn in self.ours)

    @property
    def ratios(self) -> dict[str, float]:
        return {
            "time_ratio": round(self.ours_s / self.plain_s, 3),
            "cpu_ratio": round(self.ours_cpu_s / self.plain_cpu_s, 3),
            "memory_ratio": round(self.ours[0].result / self.plain[0].result, 3),
        }


TABLE: Columns[Row] = {
    "": lambda row: row.case,
    "plain s": lambda row: f"{row.plain_s:.2f}",
    "ours s": lambda row: f"{row.ours_s:.2f}",
    "ratio": lambda row: f"{row.ratios['time_ratio']:.2f}",
    "plain CPU s": lambda row: f"{row.plain_cpu_s:.2f}",
    "ours CPU s": lambda row: f"{row.ours_cpu_s:.2f}",
    "CPU ratio": lambda row: f"{row.ratios['cpu_ratio']:.2f}",
    "plain MB": lambda row: f"{row.plain[0].result:.0f}",
    "ours MB": lambda row: f"{row.ours[0].result:.0f}",
    "MB ratio": lambda row: f"{row.ratios['memory_ratio']:.2f}",
}


def compare(case: str, dtype: torch.dtype, turns: int, threads: int) -> Row:
    """Measure both sides of one of ``CASES``."""
    plain_work, our_work = CASES[case]
    setups = {"plain": partial(side, plain_work, dtype), "ours": partial(side, our_work, dtype)}
    _, taken = take_turns(setups, turns, threads)
    return Row(f"{str(dtype).removeprefix('torch.')} {case}", taken["plain"], taken["ours"])


def errors() -> dict[str, float]:
    """Return the largest differences of log-probs from float64."""
    largest: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, name = inputs(dtype, CHECKED, logits=False), str(dtype).removeprefix("torch.")

        def exact(logits_TV: Tensor, target_T: Tensor = x.target_T) -> Tensor:
            return logits_TV.double().log_softmax(-1).gather(-1, target_T[:, None])[:, 0]

        with torch.no_grad():
            of_operands = torch.cat(
                [x.hidden_TH.double() @ part.double().T for part in x.weight_VH.split(2**14)], -1
            )
            rounded = x.hidden_TH @ x.weight_VH.T
            fused, single = (
                fused_logprob(
                    x.hidden_TH,
                    x.weight_VH,
                    x.target_T,
                    HeadOptions(1.0, VOCAB, float32_logits=float32_logits),
                )
                for float32_logits in (False, True)
            )
            given = vocab_parallel_logprob(rounded, x.target_T, temperature=1.0, vocab=VOCAB)[0]
            for what, value, reference in (
                ("head", fused, exact(of_operands)),
                ("head, of its own logits", fused, exact(rounded)),
                ("float32 head", single, exact(of_operands)),
                ("logits", given, exact(rounded)),
                ("plain head", plain(rounded, x.target_T), exact(of_operands)),
            ):
                largest[f"{name} {what}"] = (value.double() - reference).abs().max().item()
    return largest


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = options.parse_args()
    console = table_console()
    rows: list[Row] = []
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float32):
            if case == "float32 head" and dtype is torch.float32:
                continue
            rows.append(compare(case, dtype, arguments.turns, arguments.threads))
            text = f"{rows[-1].case}: {json.dumps(rows[-1].ratios)}"
            console.print(text, highlight=False, soft_wrap=True)
    console.print(rows_table("log-probs", rows, TABLE))
    differences = errors()
    for name, value in differences.items():
        console.print(f"largest error of log-probs, {name}: {value:.1e}")
    cases = {row.case: row.ratios for row in rows}
    exact = ("float32 head", "bfloat16 head, of its own logits", "bfloat16 float32 head", "bfloat16 logits")
    given = cases["bfloat16 logits, overwritten"]
    document = {
        **cases["bfloat16 head"],
        "logits_time_ratio": given["time_ratio"],
        "logits_memory_ratio": given["memory_ratio"],
        "error": max(differences[name] for name in exact),
        "asked": ASKED,
        "cases": cases,
        "errors": differences,
        "threads": arguments.threads,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
