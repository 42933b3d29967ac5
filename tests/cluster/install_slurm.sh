#!/bin/bash
# Installs what the cluster tests run on: the real Slurm daemons and clients, munge and the namespace tools.
# Does nothing, and needs no root, when everything is there already. Debian 12+ or Ubuntu 22.04+.
set -euo pipefail

declare -A package_of=(
    [slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client [munged]=munge [ip]=iproute2 [ss]=iproute2
    [unshare]=util-linux [nsenter]=util-linux
)
# The daemons live in sbin, which a user's PATH often leaves out.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

missing=()
for command in "${!package_of[@]}"; do
    command -v "$command" >/dev/null || missing+=("${package_of[$command]}")
done
if ((${#missing[@]} == 0)); then
    exit 0
fi
echo "install_slurm.sh: installing ${missing[*]}"

if ! command -v apt-get >/dev/null; then
    echo "install_slurm.sh: missing ${missing[*]}, and there is no apt-get here." >&2
    echo "Install Slurm (daemons and clients), munge and iproute2 with this system's package manager." >&2
    exit 1
fi
as_root=()
if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
        echo "install_slurm.sh: missing ${missing[*]}; that needs root, and there is no sudo here." >&2
        echo "Run as root: apt-get install --no-install-recommends ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi

install() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "${missing[@]}"
}
# The package lists may be absent or stale: refresh them only when the first attempt fails.
install || { "${as_root[@]}" apt-get update -qq && install; }
