"""The programs with which an engine compiles kernels at its start, and where it keeps them.

SGLang 0.5.21 ships no binaries of its activation and rotary kernels, which every dense model needs: it writes
a build file and runs ``ninja``, which calls ``nvcc`` and the C++ compiler. It looks for nvcc below CUDA_HOME
or CUDA_PATH, then on PATH, then in /usr/local/cuda. DeepGEMM, for engines in fp8, gets the same CUDA_HOME.
Neither looks at the nvcc that pip installs: ``configs/environment/cuda-home.sh`` makes a folder of it that
has the layout of a toolkit, and an engine gets that folder where there is no other nvcc.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.rollout.engine.patches import installed

SYSTEM = "/usr/local/cuda"
"""Where SGLang looks last."""

OF_THE_ENVIRONMENT = Path("share", "slipstream", "cuda")
"""Folder of the environment's own toolkit, below its prefix."""

COMPILERS = frozenset({"ninja", "nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "cc1plus"})
"""Names of the processes that compile, as the kernel shows them."""


@dataclass(frozen=True)
class Toolchain:
    """What an engine of this machine would compile with. None: there is none."""

    home: str | None
    """Folder of the CUDA toolkit, with ``bin/nvcc``."""
    ninja: str | None
    compiler: str | None
    """The C++ compiler."""
    path: str
    """PATH of the engine's process."""

    @property
    def nvcc(self) -> str | None:
        """The compiler of kernels."""
        return None if self.home is None else f"{self.home}/bin/nvcc"


def find(variables: Mapping[str, str], prefix: str = sys.prefix, system: str = SYSTEM) -> Toolchain:
    """Return the toolchain of a process with these environment variables, in the environment ``prefix``.

    Programs of the environment come last on the PATH: it need not be activated, and ninja is one of them.
    """
    path = os.pathsep.join(filter(None, [variables.get("PATH", ""), f"{prefix}/bin"]))
    compiler = shutil.which(variables.get("CXX") or "c++", path=path)
    return Toolchain(_home(variables, path, prefix, system), shutil.which("ninja", path=path), compiler, path)


def _home(variables: Mapping[str, str], path: str, prefix: str, system: str) -> str | None:
    """Return the folder with nvcc. One that a user names is used or missed, and never replaced by another."""
    if named := variables.get("CUDA_HOME") or variables.get("CUDA_PATH"):
        return named if _has_nvcc(named) else None
    if nvcc := shutil.which("nvcc", path=path):
        return str(Path(nvcc).parent.parent)
    candidates = (system, str(Path(prefix, OF_THE_ENVIRONMENT)))
    return next(filter(_has_nvcc, candidates), None)


def _has_nvcc(home: str) -> bool:
    return os.access(f"{home}/bin/nvcc", os.X_OK)


def engine_variables(variables: Mapping[str, str], prefix: str = sys.prefix) -> dict[str, str]:
    """Return the variables that an engine on GPUs gets, and with it what it compiles.

    What is compiled is kept for the engines of all runs, by the release of SGLang, unless ``variables`` name
    other folders.
    """
    found = find(variables, prefix)
    given = {"PATH": found.path} | ({} if found.home is None else {"CUDA_HOME": found.home})
    caches = variables.get("XDG_CACHE_HOME") or (
        f"{home}/.cache" if (home := variables.get("HOME")) else None
    )
    if caches is None:  # a folder that others can write to is no place for what is executed
        return given
    own = f"{caches}/slipstream/sglang-{installed()}"
    folders = {"SGLANG_JIT_CACHE_DIR": f"{own}/jit", "SGLANG_DG_CACHE_DIR": f"{own}/deep_gemm"}
    return given | {name: folder for name, folder in folders.items() if name not in variables}


def compiles(process: int) -> bool:
    """True if a process is a compiler at work."""
    try:
        return Path(f"/proc/{process}/comm").read_text(encoding="utf-8").strip() in COMPILERS
    except OSError:  # it has ended
        return False
