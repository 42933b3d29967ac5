#!/bin/sh
# Makes a folder with the layout of a CUDA toolkit of what pip has installed in an interpreter's environment:
#
#     cuda-home.sh PYTHON
#
# SGLang compiles kernels with CUDA_HOME/bin/nvcc and links CUDA_HOME/lib64/libcudart.so. The packages of NVIDIA have
# lib in place of lib64, and no names of libraries without a version. Engines get the folder where the machine has no
# other nvcc (rollout/engine/toolchain.py).
set -eu
site=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
home=$("$1" -c 'import sys; print(sys.prefix)')/share/slipstream/cuda

nvcc=$(ls "$site"/nvidia/*/bin/nvcc 2>/dev/null | tail -n 1)
if [ -z "$nvcc" ]; then
    echo "no nvcc of pip's below $site/nvidia: the package nvidia-cuda-nvcc is missing" >&2
    exit 1
fi
toolkit=$(dirname "$(dirname "$nvcc")")
chmod +x "$toolkit"/bin/* 2>/dev/null || true
rm -rf "$home"
mkdir -p "$home/lib64"
for part in bin include nvvm; do
    [ ! -e "$toolkit/$part" ] || ln -s "$toolkit/$part" "$home/$part"
done
for library in "$toolkit"/lib/*.so* "$toolkit"/lib/*.a; do
    [ -e "$library" ] || continue
    name=$(basename "$library")
    ln -sf "$library" "$home/lib64/$name"
    case $name in
    *.so.*) [ -e "$toolkit/lib/${name%%.so.*}.so" ] || ln -sf "$library" "$home/lib64/${name%%.so.*}.so" ;;
    esac
done
echo "$home"
