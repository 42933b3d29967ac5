"""Log-probs of 1,024 tokens of a vocabulary of 151,936, forward and backward, against the plain formula.

    python -m benchmarks.logprob           # five to fifteen minutes, 9 GB

From hidden states: ``fused_logprob`` against LM head, log_softmax and gather, with the shape of Qwen3-1.7B's
head; the weight's gradient ends up in a float32 buffer that is there, as Megatron's DDP keeps it. From logits
N(0, 2): ``vocab_parallel_logprob`` against log_softmax and gather. Ours give the entropy too, theirs do not.

Each side is a process of its own, and they take turns; times are the fastest of all turns, by the clock and
of the CPU. On a machine with other work the second is what can be repeated, best with one thread
(--threads 1), as threads that wait for each other burn it. Memory is how far the resident size grows to its
peak (VmHWM) in a side's first turn, before its allocator holds anything to use again.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.bridge import peak_mb, reset_peak
from benchmarks.given_logits import vocab_parallel_logprob
from slipstream.backend.objective.logprob import fused_logprob

TOKENS, HIDDEN, VOCAB = 1024, 2048, 151936
SCALE = 2.0
CHECKED = 64
"""Tokens that are compared with float64."""
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
    x.buffer_VH.add_(x.weight_VH.grad)
    x.weight_VH.grad = x.hidden_TH.grad = None


def fused_head(x: Inputs, *, float32_logits: bool = False) -> None:
    logp_T, _ = fused_logprob(
        x.hidden_TH,
        x.weight_VH,
        x.target_T,
        temperature=1.0,
        vocab=VOCAB,
        float32_logits=float32_logits,
        weight_grad=x.buffer_VH,
    )
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


CASES: dict[str, tuple[Callable[[Inputs], None], ...]] = {
    "head": (plain_head, fused_head),
    "float32 head": (plain_head, fused_float32_head),
    "logits": (plain_logits, given_logits),
    "logits, overwritten": (plain_logits, overwritten_logits),
}
"""By name: the plain side, ours."""


@dataclass
class Side:
    seconds: list[float]
    cpu_seconds: list[float]
    peak_mb: float


def serve(pipe: Connection, work: Callable[[Inputs], None], dtype: torch.dtype, threads: int) -> None:
    """One side: a turn for each message. The answer is its seconds and its peak."""
    torch.set_num_threads(threads)
    x = inputs(dtype, TOKENS, logits="logits" in work.__name__)
    few = slice(0, 8)
    part = replace(
        x,
        hidden_TH=x.hidden_TH[few].detach().requires_grad_(),
        logits_TV=x.logits_TV[few].detach().clone().requires_grad_(),
        target_T=x.target_T[few],
        grad_T=x.grad_T[few],
    )
    work(part)  # loads what is loaded at the first use
    while pipe.recv():
        before = reset_peak()
        began, cpu = time.perf_counter(), time.process_time()
        work(x)
        pipe.send((time.perf_counter() - began, time.process_time() - cpu, peak_mb() - before))


def compare(case: str, dtype: torch.dtype, turns: int, threads: int) -> tuple[Side, Side]:
    context = multiprocessing.get_context("spawn")
    pipes, found = [], (Side([], [], 0.0), Side([], [], 0.0))
    for work in CASES[case]:
        mine, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, work, dtype, threads), daemon=True).start()
        theirs.close()
        pipes.append(mine)
    for turn in range(turns):
        for pipe, side in zip(pipes, found, strict=True):
            pipe.send(True)
            seconds, cpu_seconds, peak = pipe.recv()
            side.seconds.append(seconds)
            side.cpu_seconds.append(cpu_seconds)
            side.peak_mb = peak if turn == 0 else side.peak_mb
    for pipe in pipes:
        pipe.send(False)
    return found


def errors() -> dict[str, float]:
    """Largest differences of log-probs from float64."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, name = inputs(dtype, CHECKED, logits=False), str(dtype).removeprefix("torch.")
        options = {"temperature": 1.0, "vocab": VOCAB}

        def exact(logits_TV: Tensor, target_T: Tensor = x.target_T) -> Tensor:
            return logits_TV.double().log_softmax(-1).gather(-1, target_T[:, None])[:, 0]

        with torch.no_grad():
            of_operands = torch.cat(
                [x.hidden_TH.double() @ part.double().T for part in x.weight_VH.split(2**14)], -1
            )
            rounded = x.hidden_TH @ x.weight_VH.T
            fused = fused_logprob(x.hidden_TH, x.weight_VH, x.target_T, **options)[0]
            single = fused_logprob(x.hidden_TH, x.weight_VH, x.target_T, **options, float32_logits=True)[0]
            given = vocab_parallel_logprob(rounded, x.target_T, **options)[0]
            for what, value, reference in (
                ("head", fused, exact(of_operands)),
                ("head, of its own logits", fused, exact(rounded)),
                ("float32 head", single, exact(of_operands)),
                ("logits", given, exact(rounded)),
                ("plain head", plain(rounded, x.target_T), exact(of_operands)),
            ):
                found[f"{name} {what}"] = (value.double() - reference).abs().max().item()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    console = Console()
    table = Table(
        "", "plain s", "ours s", "ratio", "plain CPU s", "ours CPU s", "ratio", "plain MB", "ours MB", "ratio"
    )
    cases: dict[str, dict[str, float]] = {}
    for case in CASES:
        for dtype in (torch.bfloat16, torch.float32):
            if case == "float32 head" and dtype is torch.float32:
                continue
            theirs, ours = compare(case, dtype, arguments.turns, arguments.threads)
            name = f"{str(dtype).removeprefix('torch.')} {case}"
            cases[name] = {
                "time_ratio": round(min(ours.seconds) / min(theirs.seconds), 3),
                "cpu_ratio": round(min(ours.cpu_seconds) / min(theirs.cpu_seconds), 3),
                "memory_ratio": round(ours.peak_mb / theirs.peak_mb, 3),
            }
            console.print(f"{name}: {json.dumps(cases[name])}", highlight=False, soft_wrap=True)
            table.add_row(
                name,
                f"{min(theirs.seconds):.2f}",
                f"{min(ours.seconds):.2f}",
                f"{cases[name]['time_ratio']:.2f}",
                f"{min(theirs.cpu_seconds):.2f}",
                f"{min(ours.cpu_seconds):.2f}",
                f"{cases[name]['cpu_ratio']:.2f}",
                f"{theirs.peak_mb:.0f}",
                f"{ours.peak_mb:.0f}",
                f"{cases[name]['memory_ratio']:.2f}",
            )
    console.print(table)
    differences = errors()
    for name, value in differences.items():
        console.print(f"largest error of log-probs, {name}: {value:.1e}")
    exact = ("float32 head", "bfloat16 head, of its own logits", "bfloat16 float32 head", "bfloat16 logits")
    default, given = cases["bfloat16 head"], cases["bfloat16 logits, overwritten"]
    print(
        json.dumps(
            default
            | {"logits_time_ratio": given["time_ratio"], "logits_memory_ratio": given["memory_ratio"]}
            | {"error": max(differences[name] for name in exact), "asked": ASKED}
            | {"cases": cases, "errors": differences, "threads": arguments.threads}
        )
    )


if __name__ == "__main__":
    main()
