"""Whether this node compiles what engines compile at their start, and whether the result runs on its GPU.

First a small file goes the way of SGLang's kernels, from ninja over nvcc and the C++ compiler to a library
that is linked with CUDA's runtime; that needs no GPU. Then SGLang compiles and launches two kernels of its
own, the activation and the rotary embedding that every dense model needs. PyTorch's results are the measure.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

from slipstream.backend.commands.doctor import Finding
from slipstream.rollout.engine.toolchain import Toolchain, engine_variables

CUDA = 13
"""Major version of nvcc: that of the PyTorch which loads what is compiled."""

COMPILE_TIMEOUT_S = 900.0
"""Longest time of one compilation on a busy node."""

LARGEST_ERROR = 1e-2
"""Largest relative error of a kernel in bfloat16."""

SOURCE = """
#include <cuda_runtime.h>
#include <concepts>
template <std::integral T> __global__ void add(T *x) { x[threadIdx.x] += T(1); }
extern "C" int launch(int *x) { add<<<1, 32>>>(x); return int(cudaGetLastError()); }
"""
"""C++20 as in SGLang's kernels."""

LAUNCHED = """
import importlib, json
facts, errors = {}, {}
def ask(name, question):
    try:
        facts[name] = question()
    except BaseException as error:
        errors[name] = f"{type(error).__name__}: {error}"[-600:]
def distance(found, wanted):
    return ((found.float() - wanted).norm() / wanted.norm()).item()
def activation():
    from sglang.kernels.ops.activation.activation import silu_and_mul
    x = torch.randn(8, 2048, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(8, 1024, device="cuda", dtype=torch.bfloat16)
    silu_and_mul(x, out)
    return distance(out, torch.nn.functional.silu(x[:, :1024].float()) * x[:, 1024:].float())
def rotary():
    from sglang.kernels.ops.attention.rope import apply_rope_inplace
    q, k = (torch.randn(8, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    at = torch.arange(8, device="cuda")
    angles = at[:, None].float() / 10_000 ** (torch.arange(64, device="cuda") / 64)
    cos, sin = angles.cos(), angles.sin()
    def rotated(x):
        a, b = x.float().chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)
    wanted = torch.cat([rotated(q), rotated(k)], 1)
    apply_rope_inplace(q, k, torch.cat([cos, sin], -1), at, is_neox=True)
    return distance(torch.cat([q, k], 1), wanted)
import torch
torch.manual_seed(0)
ask("activation", activation)
ask("rotary embedding", rotary)
ask("deep_gemm", lambda: importlib.import_module("deep_gemm").__name__)
print(json.dumps({"facts": facts, "errors": errors}))
"""
"""Program that prints the relative error of each kernel, and for what failed the reason."""


class LaunchedKernels(TypedDict, total=False):
    """What became of SGLang's own kernels."""

    facts: dict[str, float | str]
    errors: dict[str, str]


@dataclass(frozen=True)
class Compiled:
    """What became of the small file."""

    release: str
    """Release of CUDA that nvcc states; empty: none."""
    problem: str
    """The last lines of what failed; empty: it was compiled and linked."""


def compile_sample(found: Toolchain, variables: Mapping[str, str]) -> Compiled:
    """Compile the small file. Needs all of the toolchain."""
    assert found.nvcc is not None and found.ninja is not None and found.compiler is not None
    environment = {**variables, "PATH": found.path}
    try:
        stated = _output([found.nvcc, "--version"], environment)
        release = re.search(r"release (\d+\.\d+)", stated)
        with TemporaryDirectory(prefix="slipstream-doctor-") as folder:
            Path(folder, "sample.cu").write_text(SOURCE)
            Path(folder, "build.ninja").write_text(_build_file(found))
            _output([found.ninja, "-C", folder], environment)
    except subprocess.TimeoutExpired:
        return Compiled("", f"no end in {COMPILE_TIMEOUT_S:.0f} s")
    except OSError as error:
        return Compiled("", str(error))
    except subprocess.CalledProcessError as error:
        said = _last_lines(f"{error.stdout}\n{error.stderr}")
        return Compiled("", said or f"{error.cmd[0]} ended with {error.returncode}")
    return Compiled(release[1] if release else "", "")


def _output(command: list[str], environment: Mapping[str, str]) -> str:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S
    ).stdout


def _build_file(found: Toolchain) -> str:
    return f"""
rule kernel
  command = "{found.nvcc}" -std=c++20 -Xcompiler -fPIC -c $in -o $out
rule library
  command = "{found.compiler}" $in -shared -L"{found.home}/lib64" -lcudart -o $out
build sample.o: kernel sample.cu
build sample.so: library sample.o
"""


def _last_lines(text: str, lines: int = 4) -> str:
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])


def launch_kernels(variables: Mapping[str, str]) -> LaunchedKernels:
    """Let SGLang compile and launch its kernels in a process like that of an engine."""
    environment = {**variables, **engine_variables(variables)}
    try:
        return json.loads(_output([sys.executable, "-c", LAUNCHED], environment).splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"errors": {"activation": f"no end in {COMPILE_TIMEOUT_S:.0f} s"}}
    except subprocess.CalledProcessError as error:
        said = _last_lines(str(error.stderr))
        return {"errors": {"activation": said or f"the process ended with {error.returncode}"}}
    except (IndexError, ValueError) as error:
        return {"errors": {"activation": str(error)}}


def compilers(found: Toolchain, variables: Mapping[str, str]) -> Finding:
    """Say which of the programs there are."""
    what = "compilers of engines"
    named = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    nvcc = (
        f"CUDA_HOME or CUDA_PATH is {named}, which has no bin/nvcc: unset it, or name one of CUDA {CUDA}"
        if named
        else "`make install GPU=1` lays out pip's nvcc; or set CUDA_HOME to a toolkit (`module load cuda`)"
    )
    missing = {
        "nvcc": (found.nvcc, nvcc),
        "ninja": (found.ninja, "`make install GPU=1`"),
        "C++ compiler": (found.compiler, "install g++ (apt-get install g++), or name one with CXX"),
    }
    absent = {name: advice for name, (program, advice) in missing.items() if program is None}
    if absent:
        advice = "; ".join(f"{name}: {how}" for name, how in absent.items())
        return Finding(what, f"no {', no '.join(absent)}", advice, wrong=True)
    return Finding(what, f"{found.nvcc}, {found.ninja}, {found.compiler}")


def compilation(compiled: Compiled | None) -> Finding:
    """Say what became of the small file. None: there are no compilers."""
    what = "a kernel compiles"
    if compiled is None:
        return Finding(what, "cannot be seen: a compiler is missing", seen=False)
    if compiled.problem:
        advice = (
            "engines would end at their start: nvcc and the C++ compiler must fit each other (CXX, CUDA_HOME)"
        )
        return Finding(what, compiled.problem, advice, wrong=True)
    if compiled.release.split(".")[0] != str(CUDA):
        advice = f"PyTorch is built for CUDA {CUDA}: name such a toolkit with CUDA_HOME, or unset it"
        return Finding(what, f"by nvcc of CUDA {compiled.release or 'unknown'}", advice, wrong=True)
    return Finding(what, f"by nvcc of CUDA {compiled.release}")


def kernels(launched: LaunchedKernels | None) -> Finding:
    """Say what became of SGLang's own kernels. None: they could not be asked for."""
    what = "kernels of engines"
    if launched is None:
        return Finding(what, "cannot be seen: they need a driver and the compilers", seen=False)
    errors = dict(launched.get("errors", {}))
    without_gemm = errors.pop("deep_gemm", None)
    facts = {name: value for name, value in launched.get("facts", {}).items() if isinstance(value, float)}
    wrong = {name: value for name, value in facts.items() if not value <= LARGEST_ERROR}
    if errors or wrong:
        told = [f"{name}: {error}" for name, error in errors.items()]
        told += [f"{name}: wrong by {value:.2g} of its size" for name, value in wrong.items()]
        advice = "engines would end at their start, or compute nonsense: look at the compilers above"
        return Finding(what, "; ".join(told), advice, wrong=True)
    advice = f"engines in fp8 cannot start: DeepGEMM: {without_gemm}" if without_gemm else ""
    return Finding(what, f"compiled and right: {', '.join(facts)}", advice)
