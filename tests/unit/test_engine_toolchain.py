"""An engine compiles with what SGLang would find, or with the environment's own nvcc, and has time to."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.rollout.engine import toolchain
from slipstream.rollout.engine.server_process import (
    BETWEEN_COMPILERS_S,
    COMPILATION_S,
    ServerSpec,
    StartTime,
    _environment,
)
from slipstream.rollout.engine.toolchain import OF_THE_ENVIRONMENT, engine_variables, find
from tests.environment import ROOT, killed_at_end


def program(path: Path, text: str = "exit 0") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment that is not activated, with ninja and its own toolkit."""
    program(tmp_path / "venv/bin/ninja")
    program(tmp_path / "venv" / OF_THE_ENVIRONMENT / "bin/nvcc")
    return tmp_path / "venv"


def home_of(variables: dict[str, str], prefix: Path, system: Path | None = None) -> str | None:
    return find(variables, str(prefix), str(system or prefix / "no-system")).home


def test_the_order_is_that_of_sglang_and_the_environments_own_nvcc_is_last(tmp_path, prefix):
    system, other = tmp_path / "system", tmp_path / "other"
    assert home_of({}, prefix) == str(prefix / OF_THE_ENVIRONMENT)
    program(system / "bin/nvcc")
    assert home_of({}, prefix, system) == str(system)
    program(other / "bin/nvcc")
    on_path = {"PATH": str(other / "bin")}
    assert home_of(on_path, prefix, system) == str(other)
    program(tmp_path / "named/bin/nvcc")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        assert home_of({**on_path, name: str(tmp_path / "named")}, prefix, system) == str(tmp_path / "named")


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_folder_that_is_named_and_has_no_nvcc_is_not_replaced_silently(tmp_path, prefix, name):
    program(tmp_path / "system/bin/nvcc")
    variables = {name: str(tmp_path / "wrong")}
    assert home_of(variables, prefix, tmp_path / "system") is None
    assert "CUDA_HOME" not in engine_variables(variables, str(prefix))


def test_ninja_and_the_compiler_are_found_in_an_environment_that_is_not_activated(tmp_path, prefix):
    cxx = program(tmp_path / "bin/c++")
    found = find({"PATH": str(tmp_path / "bin")}, str(prefix))
    assert (found.ninja, found.compiler) == (str(prefix / "bin/ninja"), cxx)
    assert found.path.split(":")[-1] == str(prefix / "bin")
    named = program(tmp_path / "bin/clang++")
    assert find({"PATH": str(tmp_path / "bin"), "CXX": "clang++"}, str(prefix)).compiler == named
    own = find({"PATH": str(tmp_path / "nothing")}, str(tmp_path / "empty"))
    assert (own.ninja, own.compiler) == (None, None)


def test_what_is_compiled_is_kept_by_the_release_of_sglang_where_the_user_keeps_caches(prefix, monkeypatch):
    monkeypatch.setattr(toolchain, "installed", lambda: "0.5.21")
    names = ("SGLANG_JIT_CACHE_DIR", "SGLANG_DG_CACHE_DIR")
    given = engine_variables({"HOME": "/home/me"}, str(prefix))
    assert [given[name] for name in names] == [
        f"/home/me/.cache/slipstream/sglang-0.5.21/{kind}" for kind in ("jit", "deep_gemm")
    ]
    elsewhere = engine_variables({"HOME": "/home/me", "XDG_CACHE_HOME": "/scratch"}, str(prefix))
    assert elsewhere[names[0]] == "/scratch/slipstream/sglang-0.5.21/jit"
    own = engine_variables({"HOME": "/home/me", names[0]: "/mine"}, str(prefix))
    assert names[0] not in own and names[1] in own
    assert not set(names) & set(engine_variables({}, str(prefix))), "nothing is executed from a shared folder"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_engines_on_gpus_alone_get_the_toolchain(device, prefix, monkeypatch):
    monkeypatch.setattr(toolchain, "engine_variables", lambda variables: {"CUDA_HOME": "/found"})
    monkeypatch.delenv("CUDA_HOME", raising=False)
    spec = ServerSpec(Path("model"), "bfloat16", device, 1, "127.0.0.1", 1, 0, 0)
    assert _environment(spec).get("CUDA_HOME") == ("/found" if device == "cuda" else None)


# ---- the folder that the installation makes


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose environment has NVIDIA's packages as pip installs them."""
    prefix = tmp_path / "venv"
    site = prefix / "lib/python3.12/site-packages"
    cu13 = site / "nvidia/cu13"
    program(cu13 / "bin/nvcc", 'echo "$@" > "$RECORD"')
    for name in ("include/cuda.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libcudadevrt.a"):
        (cu13 / name).parent.mkdir(parents=True, exist_ok=True)
        (cu13 / name).touch()
    answers = f'case "$2" in *purelib*) echo {site} ;; *) echo {prefix} ;; esac'
    return program(prefix / "bin/python", answers)


def make_home(python: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "configs/environment/cuda-home.sh"
    return subprocess.run(["sh", str(script), python], capture_output=True, text=True, check=False)


def test_the_installation_makes_a_toolkit_of_what_pip_has_installed(python, tmp_path):
    for _ in range(2):  # it can be installed anew
        made = make_home(python)
        assert made.returncode == 0, made.stderr
    prefix = Path(python).parent.parent
    home = Path(made.stdout.strip())
    assert home == prefix / OF_THE_ENVIRONMENT
    # What SGLang 0.5.21 asks for: -L$CUDA_HOME/lib64 -lcudart, and headers beside nvcc.
    for name in ("lib64/libcudart.so", "lib64/libcudart.so.13", "lib64/libcudadevrt.a", "include/cuda.h"):
        assert (home / name).exists(), name
    assert (home / "nvvm/bin/cicc").exists()
    found = find({}, str(prefix), str(tmp_path / "no-system"))
    assert found.nvcc == str(home / "bin/nvcc")
    record = tmp_path / "record"
    assert found.nvcc is not None
    subprocess.run([found.nvcc, "-c", "kernel.cu"], env=os.environ | {"RECORD": str(record)}, check=True)
    assert record.read_text() == "-c kernel.cu\n"


def test_an_environment_without_nvcc_is_named(python):
    (Path(python).parent.parent / "lib/python3.12/site-packages/nvidia/cu13/bin/nvcc").unlink()
    made = make_home(python)
    assert made.returncode == 1 and "nvidia-cuda-nvcc is missing" in made.stderr


# ---- the time of a start


def test_a_start_without_a_compiler_has_its_time_and_not_more():
    start = StartTime(600, began=1000.0)
    assert start.goes_on(1599.9, lambda: pytest.fail("asked before the time is over"))
    assert not start.goes_on(1600.0, lambda: False)


def test_a_start_goes_on_while_it_compiles_and_between_two_compilers():
    start = StartTime(600, began=0.0)
    assert start.goes_on(600.0, lambda: True)
    assert start.goes_on(600.0 + BETWEEN_COMPILERS_S - 1, lambda: False)
    assert start.goes_on(600.0 + BETWEEN_COMPILERS_S, lambda: True)
    assert not start.goes_on(600.0 + 2 * BETWEEN_COMPILERS_S, lambda: False)
    assert not start.goes_on(600.0 + COMPILATION_S, lambda: True)


def test_a_process_is_a_compiler_by_its_name(tmp_path):
    cat = shutil.which("cat")
    assert cat is not None
    for name, expected in (("nvcc", True), ("sglang", False)):
        shutil.copy(cat, tmp_path / name)
        with killed_at_end([tmp_path / name], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.read(1)  # it runs, and has its name
            assert toolchain.compiles(process.pid) is expected
            process.communicate(b"")
    assert not toolchain.compiles(process.pid)
