"""``slipstream doctor --gpu``: what a run on GPUs needs of this node, and what to do where it is missing.

Each check reads facts of a ``ThisMachine`` and returns a finding. What PyTorch and Transformer Engine see is
asked in a process of its own, so that a driver that hangs or crashes ends a question and not the doctor.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from slipstream.backend.commands import compile_check
from slipstream.backend.commands.compile_check import Compiled, LaunchedKernels
from slipstream.backend.commands.doctor import Finding
from slipstream.configs.installed.environment import pinned
from slipstream.rollout.engine.toolchain import Toolchain, find
from slipstream.rollout.ledger.storage.locks import lock_problem
from slipstream.rollout.system import gpu_environment

DRIVER = 580
"""Oldest major version of NVIDIA's driver with CUDA 13."""

GLIBC = (2, 34)
"""Oldest glibc that SGLang's wheels (manylinux_2_34) load on."""

SHARED_MEMORY = 8 * 2**30
"""Bytes of /dev/shm for Ray's object store and for NCCL, which takes some 10 MB for each pair of ranks of
a node that cannot reach each other's memory."""

TIMEOUT_S = 180.0
"""Longest time for one question. The first start of CUDA on eight GPUs takes some ten seconds."""

PROBE = """
import importlib, json
facts = {}
def ask(name, question):
    try:
        facts[name] = question()
    except BaseException as error:
        facts.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}".splitlines()[0]
def version_of(module):
    return str(getattr(importlib.import_module(module), "__version__", "unknown"))
ask("torch", lambda: version_of("torch"))
def layers():
    importlib.import_module("transformer_engine.pytorch")
    return version_of("transformer_engine")
if "torch" in facts:
    import torch
    ask("cuda", lambda: torch.version.cuda)
    ask("gpus", lambda: [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())])
    ask("nccl", lambda: ".".join(map(str, torch.cuda.nccl.version())))
    ask("cudnn", lambda: torch.backends.cudnn.version())
    ask("strangers", lambda: [[a, b] for a in range(len(facts["gpus"])) for b in range(len(facts["gpus"]))
                              if a != b and not torch.cuda.can_device_access_peer(a, b)])
    ask("transformer_engine", layers)
print(json.dumps(facts))
"""
"""Program that prints what PyTorch sees. A fact that cannot be had is in ``errors``, with its reason."""


class TorchFacts(TypedDict, total=False):
    """The facts that the probe prints. One that it could not have is missing."""

    torch: str
    cuda: str | None
    gpus: list[str]
    nccl: str
    cudnn: int | None
    strangers: list[list[int]]
    """Pairs of GPUs, by number, of which the first cannot reach the second's memory."""
    transformer_engine: str
    errors: dict[str, str]


@dataclass
class ThisMachine:
    """What the checks read of this machine."""

    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """The environment of this process."""

    def text(self, path: str) -> str | None:
        """Return the content of a file; None if it cannot be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if there is no such folder."""
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []

    def free(self, folder: str) -> int:
        """Return the free bytes of the file system of a folder; 0 if there is no such folder."""
        return shutil.disk_usage(folder).free if os.path.isdir(folder) else 0

    def glibc(self) -> str:
        """Return name and version of the C library."""
        return os.confstr("CS_GNU_LIBC_VERSION") or "another C library"

    def lock_problem(self, folder: Path) -> str | None:
        """Return why file locks do not keep two processes apart in a folder; None if they do."""
        try:
            return lock_problem(folder)
        except OSError as error:
            return error.strerror or str(error)

    def torch(self) -> TorchFacts:
        """Return what PyTorch sees."""
        try:
            ended = subprocess.run(
                [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
            )
            return json.loads(ended.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            return {"errors": {"torch": f"no answer in {TIMEOUT_S:.0f} s"}}
        except (subprocess.CalledProcessError, IndexError, ValueError) as error:
            return {"errors": {"torch": f"the question failed: {error}"}}

    def toolchain(self) -> Toolchain:
        """Return what an engine would compile with."""
        return find(self.variables)

    def compiled(self) -> Compiled:
        """Compile a small file with the toolchain, which is complete."""
        return compile_check.compile_sample(self.toolchain(), self.variables)

    def launched(self) -> LaunchedKernels:
        """Let SGLang compile and launch its own kernels."""
        return compile_check.launch_kernels(self.variables)


def examine_gpus(machine: ThisMachine, folder: Path) -> list[Finding]:
    """Return every finding about a run on GPUs. ``folder``: the folder of runs, whose locks are tried."""
    driver = _driver(machine)
    facts: TorchFacts = {} if driver.wrong else machine.torch()
    checks: list[Callable[[TorchFacts], Finding]] = [_cuda, _nccl, _cudnn, _transformer_engine, _peers]
    if driver.wrong:
        names = ("GPUs and CUDA", "NCCL", "cuDNN", "Transformer Engine", "peer-to-peer access")
        seen = [Finding(name, "cannot be seen: there is no driver", seen=False) for name in names]
    else:
        seen = [check(facts) for check in checks]
    return [
        driver,
        *seen,
        *_compiling(machine, has_gpus=bool(facts.get("gpus"))),
        _agreement(machine),
        _infiniband(machine),
        _shared_memory(machine),
        _locks(machine, folder),
        _glibc(machine),
    ]


def _driver(machine: ThisMachine) -> Finding:
    text = machine.text("/proc/driver/nvidia/version")
    if text is None:
        advice = "run this on a GPU node (srun --gpus-per-node=8); in a container: --nv, or --gpus all"
        return Finding("NVIDIA driver", "none", advice, wrong=True)
    match = re.search(r"\s(\d+)\.(\d+(?:\.\d+)?)\s", text)
    if match is None:
        return Finding("NVIDIA driver", "unknown version", text.splitlines()[0], wrong=True)
    old = int(match[1]) < DRIVER
    advice = f"CUDA 13 needs {DRIVER} or newer: ask the administrators for it" if old else ""
    return Finding("NVIDIA driver", f"{match[1]}.{match[2]}", advice, old)


def _missing(what: str, name: str, facts: TorchFacts, advice: str) -> Finding:
    errors = facts.get("errors", {})
    reason = errors.get(name) or errors.get("torch", "not found")
    return Finding(what, reason, advice, wrong=True)


def _cuda(facts: TorchFacts) -> Finding:
    what, gpus = "GPUs and CUDA", facts.get("gpus", [])
    if "torch" not in facts or "gpus" not in facts:
        return _missing(what, "gpus", facts, "install the GPU environment: `make install GPU=1`")
    version = facts.get("cuda")
    if version is None:
        advice = "install the GPU environment: `make install GPU=1`"
        return Finding(what, f"PyTorch {facts['torch']} is a build for CPUs", advice, wrong=True)
    if not gpus:
        advice = "the job has none (sbatch --gpus-per-node), or CUDA_VISIBLE_DEVICES hides them"
        return Finding(what, f"no GPU, CUDA {version}", advice, wrong=True)
    wrong = version.split(".")[0] != "13"
    models = ", ".join(dict.fromkeys(gpus))
    advice = "CUDA 13 is needed: `make install GPU=1`" if wrong else ""
    return Finding(what, f"{len(gpus)} x {models}, CUDA {version}", advice, wrong)


def _nccl(facts: TorchFacts) -> Finding:
    if "nccl" not in facts:
        return _missing("NCCL", "nccl", facts, "install the GPU environment: `make install GPU=1`")
    expected = pinned("gpu")["nvidia-nccl-cu13"]
    other = facts["nccl"] != expected
    advice = f"{expected} was tested: trainer and engines of all nodes must load the same version"
    return Finding("NCCL", facts["nccl"], advice if other else "", other)


def _cudnn(facts: TorchFacts) -> Finding:
    version = facts.get("cudnn")
    if version is None:
        return _missing("cuDNN", "cudnn", facts, "install the GPU environment: `make install GPU=1`")
    shown = f"{version // 10_000}.{version // 100 % 100}.{version % 100}"
    expected = pinned("gpu")["nvidia-cudnn-cu13"].rsplit(".", 1)[0]
    old = tuple(map(int, shown.split("."))) < tuple(map(int, expected.split(".")))
    advice = f"packed attention was written for {expected}: another cuDNN is before it in LD_LIBRARY_PATH"
    return Finding("cuDNN", shown, advice if old else "", old)


def _transformer_engine(facts: TorchFacts) -> Finding:
    if "transformer_engine" not in facts:
        advice = "build it against the installed torch (nvcc needed): `make install GPU=1`; or use the image"
        return _missing("Transformer Engine", "transformer_engine", facts, advice)
    return Finding("Transformer Engine", facts["transformer_engine"], "its layers can be imported")


def _peers(facts: TorchFacts) -> Finding:
    what = "peer-to-peer access"
    if "strangers" not in facts:
        return _missing(what, "strangers", facts, "")
    if not facts["strangers"]:
        return Finding(what, "between all GPUs")
    pairs = ", ".join(f"{first}->{second}" for first, second in facts["strangers"])
    advice = (
        "NCCL goes through host memory: look at `nvidia-smi topo -m`, at IOMMU and ACS in the BIOS, and in a "
        "virtual machine at its settings"
    )
    return Finding(what, f"not for {pairs}", advice, wrong=True)


def _compiling(machine: ThisMachine, *, has_gpus: bool) -> list[Finding]:
    compilers = compile_check.compilers(machine.toolchain(), machine.variables)
    compiled = compile_check.compilation(None if compilers.wrong else machine.compiled())
    can_launch = has_gpus and compiled.seen and not compiled.wrong
    return [compilers, compiled, compile_check.kernels(machine.launched() if can_launch else None)]


def _agreement(machine: ThisMachine) -> Finding:
    names = gpu_environment.AGREED
    given = [f"{name}={machine.variables[name]}" for name in names if name in machine.variables]
    if not given:
        state = f"{' and '.join(names)} are left to the run"
        return Finding("NCCL settings", state, "it gives both sides the same values")
    advice = (
        "a run sets them for trainer and engines alike, from rollout.engine.args (enable_symm_mem, "
        "enable_nccl_nvls), and replaces these values: unset them"
    )
    return Finding("NCCL settings", ", ".join(given), advice)


def infiniband_ports(machine: ThisMachine) -> dict[str, str]:
    """Return the state of each port of an InfiniBand or RoCE adapter, by its name."""
    root = "/sys/class/infiniband"
    return {
        f"{device}/{port}": machine.text(f"{root}/{device}/ports/{port}/state") or "unreadable"
        for device in machine.names(root)
        for port in machine.names(f"{root}/{device}/ports")
    }


def _infiniband(machine: ThisMachine) -> Finding:
    ports = infiniband_ports(machine)
    if not ports:
        advice = "one node needs none, several would use TCP; a container needs /dev/infiniband"
        return Finding("InfiniBand", "none", advice)
    down = [name for name, state in ports.items() if "ACTIVE" not in state]
    active = f"{len(ports) - len(down)} of {len(ports)} ports are active"
    advice = f"not active: {', '.join(down)}; choose the others with NCCL_IB_HCA, or ask the administrators"
    wrong = len(down) == len(ports)
    if not wrong and not machine.names("/dev/infiniband"):
        advice = "/dev/infiniband is not here: the container must be started with it"
        return Finding("InfiniBand", active, advice, wrong=True)
    return Finding("InfiniBand", active, advice if down else "", wrong)


def _shared_memory(machine: ThisMachine) -> Finding:
    free = machine.free("/dev/shm")
    small = free < SHARED_MEMORY
    advice = f"{SHARED_MEMORY / 2**30:.0f} GiB are needed, in a container: --shm-size=32g, or --ipc=host"
    return Finding("/dev/shm for NCCL and Ray", f"{free / 2**30:.1f} GiB", advice if small else "", small)


def _locks(machine: ThisMachine, folder: Path) -> Finding:
    problem = machine.lock_problem(folder)
    if problem is None:
        return Finding("file locks", f"work in {folder.resolve()}")
    advice = "two drivers are kept apart by the lease alone: docs/recovery.md says which file systems serve"
    return Finding("file locks", f"{folder.resolve()}: {problem}", advice, wrong=True)


def _glibc(machine: ThisMachine) -> Finding:
    text = machine.glibc()
    match = re.fullmatch(r"glibc (\d+)\.(\d+).*", text)
    old = match is None or (int(match[1]), int(match[2])) < GLIBC
    needed = ".".join(map(str, GLIBC))
    advice = f"SGLang's wheels need glibc {needed} or newer: use the container image (docs/install.md)"
    return Finding("C library", text, advice if old else "", old)
