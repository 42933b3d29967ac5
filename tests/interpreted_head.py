"""The kernels of the LM head against float64, in Triton's interpreter, and compiled for an H100.

    python -m tests.interpreted_head values       # with TRITON_INTERPRET=1
    python -m tests.interpreted_head compiled     # without

Prints a JSON object. A process of its own, because Triton reads the variable when kernels are defined, and
because a CPU environment keeps Triton out of the way of the packages that behave differently beside it.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tests.environment import environment

SLICE, BLOCK = 48, 32
"""Columns of a slice and of a block: the vocabularies below have several of each, and ragged ends."""
CASES = {
    "float32": {"tokens": 37, "width": 40, "vocab": 101, "padding": 3},
    "bfloat16": {"tokens": 37, "width": 40, "vocab": 101, "padding": 3, "dtype": "bfloat16"},
    "even sizes": {"tokens": 32, "width": 32, "vocab": 96},
    "one token": {"tokens": 1, "width": 5, "vocab": 7},
    "no tokens": {"tokens": 0, "width": 8, "vocab": 9},
    "temperature 1": {"tokens": 20, "width": 24, "vocab": 70, "temperature": 1.0},
    "without the gradient of the entropy": {"tokens": 20, "width": 24, "vocab": 70, "entropy": "value"},
    "without the entropy": {"tokens": 20, "width": 24, "vocab": 70, "entropy": "none"},
    "far logits": {"tokens": 20, "width": 24, "vocab": 70, "scale": 30.0},
    "two shards": {"tokens": 20, "width": 24, "vocab": 91, "padding": 5, "shards": 2},
    "a shard of padding alone": {"tokens": 9, "width": 8, "vocab": 20, "padding": 28, "shards": 2},
}

FURTHER = "further tokens"


def triton_environment(*, interpreted: bool) -> dict[str, str]:
    """The environment of a process that finds Triton: beside a CPU environment's packages, or among them."""
    folders = [] if importlib.util.find_spec("triton") else [Path(sys.prefix) / "triton"]
    # A cache elsewhere would keep what an earlier version of the kernels gave.
    return environment(*folders, TRITON_INTERPRET=str(int(interpreted)))


def printed(what: str, *, interpreted: bool) -> dict:
    """Run this module in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, what],
        env=triton_environment(interpreted=interpreted),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, f"{done.stderr[-4000:]}\nno module triton: `make test-fast` installs it"
    return json.loads(done.stdout)


def errors(
    *,
    tokens: int,
    width: int,
    vocab: int,
    padding: int = 0,
    dtype: str = "float32",
    temperature: float = 0.7,
    entropy: str = "gradient",
    scale: float = 2.0,
    shards: int = 1,
) -> dict[str, float]:
    """Return the largest difference from float64 of each result, relative to its largest value if above 1."""
    from slipstream.backend.objective import logprob

    generator = torch.Generator().manual_seed(tokens)
    kind = getattr(torch, dtype)
    hidden = torch.randn(tokens, width, generator=generator).to(kind)
    weight = (scale * torch.randn(vocab + padding, width, generator=generator) / math.sqrt(width)).to(kind)
    target = torch.randint(vocab, (tokens,), generator=generator)
    grad, entropy_grad = torch.randn(2, tokens, generator=generator)
    if entropy != "gradient":
        entropy_grad = torch.zeros_like(entropy_grad)
    parts = [part.clone().requires_grad_() for part in weight.chunk(shards)]
    hiddens = [hidden.clone().requires_grad_() for _ in parts]
    options = logprob.HeadOptions(temperature, vocab, float32_logits=True, implementation="triton")
    results = over_shards(hiddens, parts, target, options, entropy, grad, entropy_grad)
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    logp_TV = (leaves[0] @ leaves[1][:vocab].T / temperature).log_softmax(-1)
    expected = [logp_TV.gather(-1, target[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)]
    (expected[0] @ grad.double() + expected[1] @ entropy_grad.double()).backward()
    actual = [*results, sum(h.grad.double() for h in hiddens), torch.cat([part.grad for part in parts])]
    names = ("log-prob", "entropy", "gradient of hidden", "gradient of weight")
    differences: dict[str, float] = {}
    for name, mine, exact in zip(names, actual, [*expected, *(x.grad for x in leaves)], strict=True):
        if mine is not None and exact.numel():
            largest = max(exact.abs().max().item(), 1.0)
            differences[name] = (mine.detach().double() - exact).abs().max().item() / largest
    return differences


def over_shards(
    hiddens: list[Tensor],
    parts: list[Tensor],
    target: Tensor,
    options: object,
    entropy: str,
    grad: Tensor,
    entropy_grad: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Run the head on every shard as its rank would, one after the other.

    Two passes: the first collects what every rank contributes to the collectives, the second gives each rank
    the result.
    """
    from slipstream.backend.objective import logprob, softmax

    contributions: list[list[Tensor]] = []
    given: list[Tensor] = []
    reduced: list[Tensor] = []

    class Collectives:
        @staticmethod
        def all_reduce(tensor: Tensor, op: object, group: object) -> None:
            if given:
                tensor.copy_(given.pop(0))
            else:
                contributions[-1].append(tensor.clone())

    def call(rank: int) -> tuple[Tensor, Tensor | None]:
        logprob.columns_of_rank = lambda columns, vocab, group: range(
            rank * columns, max(rank * columns, min((rank + 1) * columns, vocab))
        )
        hidden, weight = hiddens[rank], parts[rank]
        if entropy == "none":
            return logprob.fused_logprob(hidden, weight, target, options), None
        return logprob.fused_logprob_and_entropy(
            hidden, weight, target, options, entropy_gradient=entropy == "gradient"
        )

    softmax.typed_dist = Collectives
    if len(parts) > 1:
        options = logprob.HeadOptions(
            options.temperature, options.vocab, object(), float32_logits=True, implementation="triton"
        )
        # The largest logits, then the sums relative to them.
        for reduce in (partial(torch.amax, dim=0), partial(torch.sum, dim=0)):
            contributions.clear()
            for rank in range(len(parts)):
                contributions.append([])
                given[:] = reduced
                call(rank)
            reduced.append(reduce(torch.stack([of_rank[0] for of_rank in contributions])))
    results: tuple[Tensor, Tensor | None] | None = None
    for rank in range(len(parts)):
        given[:] = reduced
        logp, entropies = results = call(rank)
        total = logp @ grad
        if entropy == "gradient":
            total = total + entropies @ entropy_grad
        total.backward()
    assert results is not None
    return results


def values() -> dict[str, dict[str, float]]:
    from slipstream.backend.objective import head_kernels, logprob

    head_kernels.BLOCK = BLOCK
    logprob.MIN_COLUMNS, logprob.SLICE_ELEMENTS = SLICE, {"cpu": 1}
    # First: shards leave their vocabulary and their collectives behind.
    return {FURTHER: further_tokens()} | {name: errors(**case) for name, case in CASES.items()}


def further_tokens(tokens: int = 20, width: int = 24, vocab: int = 101, k: int = 5) -> dict[str, float]:
    """Return the largest differences from float64 where log-probs of further tokens are asked for.

    Some of them are the target itself, and some are none.
    """
    from slipstream.backend.objective import logprob

    generator = torch.Generator().manual_seed(7)
    hidden, weight = (torch.randn(n, width, generator=generator).requires_grad_() for n in (tokens, vocab))
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(tokens)])
    target = torch.where(torch.arange(tokens) % 2 == 0, ids[:, 1], 3)
    grad, entropy_grad = torch.randn(2, tokens, generator=generator)
    also_grad = torch.randn(tokens, k, generator=generator)
    also_grad[:, -1] = 0
    asked = torch.cat([ids[:, :-1], torch.full((tokens, 1), -1)], dim=1)
    options = logprob.HeadOptions(0.7, vocab, float32_logits=True, implementation="triton")
    logp, entropy, also = logprob.fused_logprobs(
        hidden, weight, target, asked, options, entropy_gradient=True
    )
    (logp @ grad + entropy @ entropy_grad + (also * also_grad).sum()).backward()
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logp_TV = (leaves[0] @ leaves[1].T / 0.7).log_softmax(-1)
    exact_entropy, exact_also = -(logp_TV.exp() * logp_TV).sum(-1), logp_TV.gather(-1, ids)
    exact_logp = logp_TV.gather(-1, target[:, None])[:, 0]
    total = exact_logp @ grad.double() + exact_entropy @ entropy_grad.double()
    (total + (exact_also * also_grad.double()).sum()).backward()
    pairs = {
        "log-prob": (logp, exact_logp),
        "further log-probs": (also[:, :-1], exact_also[:, :-1]),
        "gradient of hidden": (hidden.grad, leaves[0].grad),
        "gradient of weight": (weight.grad, leaves[1].grad),
    }
    return {
        name: ((mine.double() - exact).abs().max() / max(exact.abs().max().item(), 1.0)).item()
        for name, (mine, exact) in pairs.items()
    }


def compiled() -> dict[str, dict[str, int]]:
    """Compile both kernels for compute capability 9.0; return their shared memory and wide accesses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from slipstream.backend.objective import head_kernels

    found: dict[str, dict[str, int]] = {}
    constants = {"BLOCK": head_kernels.BLOCK, "ENTROPY": True}
    for dtype in ("bf16", "fp32"):
        for kernel in (head_kernels.add_kernel, head_kernels.gradient_kernel):
            types = dict.fromkeys(("first", "columns", "stride"), "i32")
            types |= dict.fromkeys(constants, "constexpr")
            types |= {"logits": f"*{dtype}", "target": "*i64", "temperature": "fp32"}
            signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
            # A run finds these to be multiples of 16: the memory of tensors, and the sizes of real models.
            multiples = [
                number
                for number, name in enumerate(kernel.arg_names)
                if signature[name].startswith("*") or name in ("first", "columns", "stride")
            ]
            attributes = {(number,): [["tt.divisibility", 16]] for number in multiples}
            made = triton.compile(
                ASTSource(kernel, signature, constants, attributes),
                target=GPUTarget("cuda", 90, 32),
                options={"num_warps": head_kernels.WARPS},
            )
            found[f"{kernel.__name__} {dtype}"] = {
                "shared": made.metadata.shared,
                "vector loads": made.asm["ptx"].count(".v4.b32"),
            }
    return found


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == str(int(sys.argv[1] == "values"))
    print(json.dumps({"values": values, "compiled": compiled}[sys.argv[1]]()))
