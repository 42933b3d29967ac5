#!/bin/sh
# Prints the exact versions of the GPU environment (extras gpu and dev) for Linux on x86-64 with glibc 2.34 and
# Python 3.12, as a resolver chooses them from the package index. Needs no GPU and installs nothing.
#
#     lock-gpu.sh UV [PINS]
#
# UV is the resolver. With PINS, a file of exact versions, it chooses those wherever they fit.
set -eu
root=$(cd -P "$(dirname "$0")" && cd ../.. && pwd)
set -- "$1" ${2:+--constraints "$2"}
uv=$1
shift
exec "$uv" pip compile "$root/pyproject.toml" --extra gpu --extra dev "$@" --quiet --no-config --system-certs --no-header \
    --no-annotate --python-version 3.12 --python-platform x86_64-manylinux_2_34 --no-python-downloads \
    --only-binary :all: --no-binary cuda-tile --no-binary transformer-engine-torch
