#!/bin/sh
# Installs the packages of the GPU environment, of exactly the versions in gpu.txt, into the environment of an
# interpreter:
#
#     install-gpu.sh PYTHON           checks the machine, then installs
#     install-gpu.sh --check PYTHON   checks the machine only
#
# Dependencies are not resolved here: gpu.txt is complete, which `make lock-check` and `pip check` show.
set -eu
only_check=
if [ "$1" = --check ]; then
    only_check=yes
    shift
fi
python=$1
pins=$(dirname "$0")/gpu.txt

"$python" - <<'CHECK'
import os
import platform
import sys

problems = []
if sys.version_info[:2] != (3, 12):
    problems.append(f"Python {platform.python_version()} found, 3.12 needed: make install GPU=1 PYTHON=python3.12")
if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    problems.append(f"{sys.platform} on {platform.machine()} found, linux on x86_64 needed")
name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "no-glibc 0.0").split()
if name != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 34):
    problems.append(
        f"{name} {version} found, glibc 2.34 or newer needed: SGLang's wheels do not load on RHEL 8 or Ubuntu 20.04; "
        "use the container image there (docs/install.md)"
    )
sys.exit("\n".join(problems) or None)
CHECK
[ -z "$only_check" ] || exit 0

wheels=$(mktemp)
trap 'rm -f "$wheels"' EXIT
grep -v '^transformer-engine-torch==' "$pins" >"$wheels"
pip() { "$python" -m pip --disable-pip-version-check install --quiet --progress-bar off --no-deps "$@"; }
pip --requirement "$wheels"
# Transformer Engine's PyTorch part is built against the torch that was just installed. It takes a prebuilt wheel of
# its own release page where that can be reached, and needs nvcc (CUDA_HOME) otherwise.
NVTE_FRAMEWORK=pytorch pip --no-build-isolation "$(grep '^transformer-engine-torch==' "$pins")"
# Engines compile kernels at their start, and never look at pip's nvcc themselves.
sh "$(dirname "$0")/cuda-home.sh" "$python" >/dev/null
