"""`slipstream doctor --gpu` on made-up machines: what is right, wrong or cannot be seen, and what to do."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from slipstream.backend.commands.compile_check import Compiled, LaunchedKernels
from slipstream.backend.commands.doctor import Finding
from slipstream.backend.commands.gpu_doctor import ThisMachine, TorchFacts, examine_gpus
from slipstream.configs.installed.environment import pinned
from slipstream.rollout.engine.toolchain import Toolchain

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version: 12\n"


@dataclass(frozen=True)
class MadeUp:
    """A machine of which everything is known: an H100 node with all that a run needs."""

    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(
        default_factory=lambda: {
            "/proc/driver/nvidia/version": DRIVER,
            "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "/sys/class/infiniband/mlx5_1/ports/1/state": "4: ACTIVE\n",
            "/dev/infiniband/uverbs0": "",
        }
    )
    shared_memory: int = 64 * 2**30
    c_library: str = "glibc 2.35"
    refusal: str | None = None
    seen: TorchFacts = field(
        default_factory=lambda: {
            "torch": "2.13.0+cu130",
            "cuda": "13.0",
            "gpus": ["NVIDIA H100 80GB HBM3"] * 8,
            "nccl": pinned("gpu")["nvidia-nccl-cu13"],
            "cudnn": 92000,
            "strangers": [],
            "transformer_engine": "2.20.2",
        }
    )

    tools: Toolchain = field(
        default_factory=lambda: Toolchain("/usr/local/cuda", "/usr/bin/ninja", "/usr/bin/c++", "/usr/bin")
    )
    sample: Compiled = field(default_factory=lambda: Compiled("13.0", ""))
    kernels: LaunchedKernels = field(
        default_factory=lambda: {
            "facts": {"activation": 2e-3, "rotary embedding": 1e-3, "deep_gemm": "deep_gemm"},
            "errors": {},
        }
    )

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, folder: str) -> list[str]:
        inside = [path.removeprefix(f"{folder}/") for path in self.files if path.startswith(f"{folder}/")]
        return sorted({path.partition("/")[0] for path in inside})

    def free(self, folder: str) -> int:
        return self.shared_memory

    def glibc(self) -> str:
        return self.c_library

    def lock_problem(self, folder: Path) -> str | None:
        return self.refusal

    def torch(self) -> TorchFacts:
        return self.seen

    def toolchain(self) -> Toolchain:
        return self.tools

    def compiled(self) -> Compiled:
        return self.sample

    def launched(self) -> LaunchedKernels:
        return self.kernels


def findings(machine: MadeUp | ThisMachine) -> dict[str, Finding]:
    return {finding.what: finding for finding in examine_gpus(machine, Path("runs"))}


def only_wrong(machine: MadeUp | ThisMachine) -> Finding:
    [finding] = [finding for finding in findings(machine).values() if finding.wrong]
    return finding


def without(facts: TorchFacts, *names: str, **errors: str) -> TorchFacts:
    left = {name: value for name, value in facts.items() if name not in names}
    return {**left, "errors": errors} if errors else left  # type: ignore[return-value,typeddict-item]


def test_nothing_is_wrong_with_a_node_that_has_everything():
    assert not [finding for finding in findings(MadeUp()).values() if finding.wrong or not finding.seen]


def test_a_machine_without_a_driver_is_wrong_and_what_cannot_be_seen_is_said():
    class Unasked(MadeUp):
        def torch(self) -> TorchFacts:
            raise AssertionError("nobody asks CUDA without a driver")

    seen = findings(Unasked(files={}))
    assert [what for what, finding in seen.items() if finding.wrong] == ["NVIDIA driver"]
    unseen = {what for what, finding in seen.items() if not finding.seen}
    assert unseen == {
        "GPUs and CUDA",
        "NCCL",
        "cuDNN",
        "Transformer Engine",
        "peer-to-peer access",
        "kernels of engines",
    }
    assert seen["a kernel compiles"].state == "by nvcc of CUDA 13.0", "which needs no GPU"
    assert seen["InfiniBand"].state == "none" and seen["C library"].state == "glibc 2.35"


@pytest.mark.parametrize(
    ("changes", "what", "state", "advice"),
    [
        ({"c_library": "glibc 2.28"}, "C library", "glibc 2.28", "container image"),
        ({"c_library": "glibc 2.33"}, "C library", "glibc 2.33", "2.34"),
        ({"c_library": "musl 1.2"}, "C library", "musl 1.2", "container image"),
        ({"shared_memory": 64 * 2**20}, "/dev/shm for NCCL and Ray", "0.1 GiB", "--shm-size"),
        (
            {"refusal": "flock: Function not implemented"},
            "file locks",
            "Function not implemented",
            "recovery.md",
        ),
    ],
)
def test_what_is_wrong_with_the_machine_is_named_with_what_to_do(changes, what, state, advice):
    finding = only_wrong(replace(MadeUp(), **changes))
    assert finding.what == what
    assert state in finding.state and advice in finding.advice


@pytest.mark.parametrize(
    ("facts", "what", "state", "advice"),
    [
        ({"cuda": None, "torch": "2.13.0+cpu"}, "GPUs and CUDA", "build for CPUs", "GPU=1"),
        ({"cuda": "12.8"}, "GPUs and CUDA", "CUDA 12.8", "GPU=1"),
        ({"gpus": []}, "GPUs and CUDA", "no GPU", "--gpus-per-node"),
        ({"nccl": "2.20.5"}, "NCCL", "2.20.5", pinned("gpu")["nvidia-nccl-cu13"]),
        ({"cudnn": 91002}, "cuDNN", "9.10.2", "LD_LIBRARY_PATH"),
        ({"strangers": [[0, 1], [1, 0]]}, "peer-to-peer access", "0->1, 1->0", "topo -m"),
    ],
)
def test_what_is_wrong_with_the_libraries_is_named_with_what_to_do(facts, what, state, advice):
    machine = MadeUp()
    finding = only_wrong(replace(machine, seen={**machine.seen, **facts}))
    assert finding.what == what
    assert state in finding.state and advice in finding.advice


def test_layers_that_cannot_be_imported_are_named_with_the_reason():
    machine = MadeUp()
    facts = without(machine.seen, "transformer_engine", transformer_engine="ImportError: libcudnn.so.9")
    finding = only_wrong(replace(machine, seen=facts))
    assert (finding.what, finding.state) == ("Transformer Engine", "ImportError: libcudnn.so.9")
    assert "make install GPU=1" in finding.advice


def test_a_torch_that_does_not_answer_makes_everything_behind_it_wrong():
    facts: TorchFacts = {"errors": {"torch": "no answer in 180 s"}}
    seen = findings(replace(MadeUp(), seen=facts))
    wrong = {what for what, finding in seen.items() if finding.wrong}
    assert wrong == {"GPUs and CUDA", "NCCL", "cuDNN", "Transformer Engine", "peer-to-peer access"}
    assert all(seen[what].state == "no answer in 180 s" for what in wrong)


def test_an_old_driver_is_wrong():
    files = {**MadeUp().files, "/proc/driver/nvidia/version": DRIVER.replace("580.95.05", "550.54.15")}
    finding = findings(replace(MadeUp(), files=files))["NVIDIA driver"]
    assert finding.wrong and "550.54.15" in finding.state and "580" in finding.advice


def test_values_that_one_side_only_would_get_are_named():
    machine = MadeUp(variables={"NCCL_CUMEM_ENABLE": "1", "PATH": "/bin"})
    finding = findings(machine)["NCCL settings"]
    assert finding.state == "NCCL_CUMEM_ENABLE=1"
    assert "unset" in finding.advice and not finding.wrong


def test_infiniband_ports_are_counted_and_a_dead_one_is_named():
    files = {**MadeUp().files, "/sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n"}
    finding = findings(MadeUp(files=files))["InfiniBand"]
    assert finding.state == "1 of 2 ports are active" and "mlx5_1/1" in finding.advice and not finding.wrong
    files["/sys/class/infiniband/mlx5_0/ports/1/state"] = "1: DOWN\n"
    assert only_wrong(MadeUp(files=files)).what == "InfiniBand"


def test_a_container_that_hides_infiniband_is_wrong():
    files = {path: text for path, text in MadeUp().files.items() if not path.startswith("/dev/infiniband")}
    finding = only_wrong(MadeUp(files=files))
    assert finding.what == "InfiniBand" and "/dev/infiniband" in finding.advice


def test_this_machine_can_be_examined(tmp_path):
    seen = {finding.what: finding for finding in examine_gpus(ThisMachine(), tmp_path)}
    assert seen["file locks"].state == f"work in {tmp_path}"
    assert seen["C library"].state.startswith("glibc 2.")


def test_torch_is_asked_in_a_process_of_its_own():
    facts = ThisMachine().torch()
    assert facts.get("torch") and "gpus" in facts
    assert "transformer_engine" in facts or "transformer_engine" in facts["errors"]
