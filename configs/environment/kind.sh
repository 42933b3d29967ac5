#!/bin/sh
# Prints the kind of environment that is to be installed in folder $1: gpu or cpu.
#
#     kind.sh VENV [0|1]
#
# The second argument is make's GPU=. Without it an environment keeps the kind that it was installed as, and a new
# one is for CPUs, unless this machine has GPUs: then nothing is chosen silently. A login node without GPUs installs
# for the nodes that have them with GPU=1.
venv=$1 asked=${2-}

fail() {
    echo "make: $*" >&2
    exit 2
}

installed=$(sed -n 's/.*"kind": "\([a-z]*\)".*/\1/p' "$venv/slipstream-environment.json" 2>/dev/null)
case $asked in
1) kind=gpu ;;
0) kind=cpu ;;
'')
    if [ -n "$installed" ]; then
        kind=$installed
    elif command -v nvidia-smi >/dev/null 2>&1; then
        fail "nvidia-smi is installed here, so both kinds of environment make sense: say \`make install GPU=1\`" \
            "(for GPUs) or \`make install GPU=0\` (for CPUs)"
    else
        kind=cpu
        echo "make: no GPU= given and no nvidia-smi here: installing for CPUs; \`make install GPU=1\` installs for GPUs" >&2
    fi
    ;;
*) fail "GPU=$asked found, GPU=1 or GPU=0 expected" ;;
esac
if [ -n "$installed" ] && [ "$installed" != "$kind" ]; then
    fail "$venv was installed for ${installed}s: install the other kind beside it" \
        "(\`make install GPU=$asked VENV=.venv-$kind\`), or remove this one first (\`make clean\`)"
fi
echo "$kind"
