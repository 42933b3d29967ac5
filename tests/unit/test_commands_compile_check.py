"""`doctor --gpu` compiles what engines compile: with scripts that record, and where programs are missing."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.backend.commands.compile_check import (
    Compiled,
    LaunchedKernels,
    compilation,
    compile_sample,
    compilers,
    kernels,
    launch_kernels,
)
from slipstream.backend.commands.gpu_doctor import ThisMachine, examine_gpus
from slipstream.rollout.engine.toolchain import find

NINJA = """
echo "ninja $@" >> "$RECORD"
cd "$2" && sed -n 's/^  command = //p' build.ninja | while read -r command; do
    in=sample.cu out=sample.o sh -c "$command" || exit 1
done"""
NVCC = 'echo "nvcc $@" >> "$RECORD"; [ "$1" != --version ] || echo "Cuda tools, release 13.0, V13.0.48"'
CXX = 'echo "c++ $@" >> "$RECORD"'

Programs = Callable[..., dict[str, str]]


@pytest.fixture
def machine(tmp_path: Path) -> Programs:
    """Make a machine with these programs alone; return the environment of a process on it."""

    def made(**programs: str) -> dict[str, str]:
        (tmp_path / "toolkit/bin").mkdir(parents=True)
        (tmp_path / "bin").mkdir()
        for name, text in ({"nvcc": NVCC, "ninja": NINJA, "c++": CXX} | programs).items():
            path = tmp_path / ("toolkit/bin" if name == "nvcc" else "bin") / name
            if text:
                path.write_text(f"#!/bin/sh\n{text}\n")
                path.chmod(0o755)
        for name in ("sh", "sed", "cat"):
            (tmp_path / "bin" / name).symlink_to(f"/bin/{name}")
        return {
            "PATH": str(tmp_path / "bin"),
            "CUDA_HOME": str(tmp_path / "toolkit"),
            "RECORD": str(tmp_path / "record"),
        }

    return made


def sample_of(variables: dict[str, str]) -> Compiled:
    return compile_sample(find(variables, "/no/prefix", "/no/system"), variables)


def test_the_sample_goes_from_ninja_over_nvcc_to_a_library_linked_with_cudas_runtime(machine):
    variables = machine()
    compiled = sample_of(variables)
    assert compiled == Compiled("13.0", "")
    version, ninja, kernel, library = Path(variables["RECORD"]).read_text().splitlines()
    assert version == "nvcc --version" and ninja.startswith("ninja -C ")
    assert kernel == "nvcc -std=c++20 -Xcompiler -fPIC -c sample.cu -o sample.o"
    assert f"-L{variables['CUDA_HOME']}/lib64 -lcudart" in library and library.startswith("c++ ")
    finding = compilation(compiled)
    assert not finding.wrong and finding.state == "by nvcc of CUDA 13.0"


FAILURES = [
    (
        {"nvcc": NVCC + "; [ $1 = --version ] || { echo 'unsupported GNU version' >&2; exit 1; }"},
        "unsupported GNU",
    ),
    ({"c++": "echo 'cannot find -lcudart' >&2; exit 1"}, "cannot find -lcudart"),
    ({"ninja": "echo 'ninja: fatal' >&2; exit 1"}, "ninja: fatal"),
    ({"nvcc": "exit 127"}, "nvcc ended with 127"),
    ({"nvcc": "kill -9 $$"}, "nvcc ended with -9"),
]


@pytest.mark.parametrize(("programs", "words"), FAILURES)
def test_a_compiler_that_fails_is_wrong_with_its_last_words(machine, programs, words):
    compiled = sample_of(machine(**programs))
    finding = compilation(compiled)
    assert finding.wrong and words in finding.state and finding.state
    assert "CUDA_HOME" in finding.advice


@pytest.mark.parametrize(("text", "release"), [("release 12.8, V1", "12.8"), ("nonsense", "unknown")])
def test_an_nvcc_of_another_cuda_is_wrong(machine, text, release):
    compiled = sample_of(machine(nvcc=f'echo "{text}"'))
    finding = compilation(compiled)
    assert finding.wrong and finding.state == f"by nvcc of CUDA {release}" and "CUDA 13" in finding.advice


MISSING = [
    ("nvcc", "no nvcc", "make install GPU=1"),
    ("ninja", "no ninja", "make install GPU=1"),
    ("c++", "no C++ compiler", "g++"),
]


@pytest.mark.parametrize(("name", "state", "advice"), MISSING)
def test_a_program_that_is_missing_is_named_with_what_to_do(machine, name, state, advice):
    variables = machine(**{name: ""})
    if name == "nvcc":
        del variables["CUDA_HOME"]
    finding = compilers(find(variables, "/no/prefix", "/no/system"), variables)
    assert finding.wrong and finding.state == state and advice in finding.advice


def test_everything_that_is_missing_is_named_at_once(machine):
    variables = machine(nvcc="", ninja="", **{"c++": ""})
    finding = compilers(find(variables, "/no/prefix", "/no/system"), variables)
    assert finding.state == "no nvcc, no ninja, no C++ compiler"
    assert f"CUDA_HOME or CUDA_PATH is {variables['CUDA_HOME']}, which has no bin/nvcc" in finding.advice


def test_a_machine_without_a_toolchain_is_examined_without_compiling(tmp_path):
    """The real checks, on this machine with a PATH that has nothing."""
    variables = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    findings = {finding.what: finding for finding in examine_gpus(ThisMachine(variables), tmp_path)}
    assert findings["compilers of engines"].wrong
    assert "nvcc" in findings["compilers of engines"].state
    assert not findings["a kernel compiles"].seen and not findings["kernels of engines"].seen


# ---- SGLang's own kernels

RIGHT: LaunchedKernels = {"facts": {"activation": 2e-3, "rotary embedding": 1e-3}, "errors": {}}


def test_kernels_that_are_right_are_named():
    finding = kernels(RIGHT)
    assert not finding.wrong and finding.state == "compiled and right: activation, rotary embedding"
    without = kernels({**RIGHT, "errors": {"deep_gemm": "ModuleNotFoundError: No module named 'deep_gemm'"}})
    assert not without.wrong and "engines in fp8 cannot start" in without.advice


@pytest.mark.parametrize("value", [0.02, float("nan"), float("inf")])
def test_a_kernel_that_computes_nonsense_is_wrong(value):
    finding = kernels({"facts": {"activation": value}, "errors": {}})
    assert finding.wrong and "activation: wrong by" in finding.state


def test_a_kernel_that_cannot_be_compiled_is_wrong():
    finding = kernels({"facts": {"activation": 1e-3}, "errors": {"rotary embedding": "RuntimeError: ninja"}})
    assert finding.wrong and finding.state == "rotary embedding: RuntimeError: ninja"


def test_the_program_says_what_failed_where_there_is_no_gpu():
    told = launch_kernels({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert kernels(told).wrong and told.get("errors", {}).get("activation")
