#!/usr/bin/env bash
# Make .venv with everything Megatron-EFA needs, from a fresh clone.
#
#   tools/bootstrap.sh [VENV]        default: .venv
#
# A Python (3.12 or newer) that already has a usable PyTorch, as in an NGC image or a DLAMI, keeps it:
# the environment is laid over that Python's packages and PyTorch is not asked for. Otherwise uv, or
# failing that a python3.12 or newer on the PATH, makes the environment and PyTorch is installed with it.
# PYTHON=... names the interpreter to use. Running it again finishes or refreshes what is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv}

die() { echo "bootstrap: $*" >&2; exit 2; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

is_this_venv() { "$1" -c 'import os, sys; sys.exit(os.path.realpath(sys.prefix) != os.path.realpath(sys.argv[1]))' "$venv"; }

brings_torch() { ! is_this_venv "$1" && has_torch "$1"; }

# Usable: imports, and is at least the oldest release that pyproject.toml's `torch` extra names. An
# image's own build ("2.11.0a0+nv26.02") counts, although no version range would accept it.
has_torch() {
    "$1" - 2>/dev/null <<'PY'
import re, sys, tomllib
with open("pyproject.toml", "rb") as file:
    extra = tomllib.load(file)["project"]["optional-dependencies"]["torch"][0]
oldest = tuple(map(int, re.search(r">=(\d+)\.(\d+)", extra).groups()))
import torch
sys.exit(tuple(map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups())) < oldest)
PY
}

find_python() { # the first interpreter that satisfies the test given
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.13 python3.14}; do
        command -v "$candidate" >/dev/null && is_new_enough "$candidate" && "$@" "$candidate" && {
            echo "$candidate"
            return 0
        }
    done
    return 1
}

# Its scripts, and its link to this checkout, name the place where it was made.
if [ -f "$venv/bin/activate" ]; then
    made_in=$(sed -nE "s/^ *(export )?VIRTUAL_ENV=[\"']?(\/[^\"']*)[\"']?\$/\2/p" "$venv/bin/activate" | head -n 1)
    if [ -n "$made_in" ] && [ "$(realpath -m "$made_in")" != "$(realpath "$venv")" ]; then
        echo "bootstrap: $venv was made as $made_in (this checkout was moved or copied): making it anew"
        rm -rf "$venv"
    fi
fi

extras="torch,dev"
if python=$(find_python brings_torch); then
    extras="dev"
    echo "bootstrap: keeping the PyTorch of $(command -v "$python")"
    # `--system-site-packages` of an interpreter that is itself in a virtual environment shows its base's
    # packages, not its own, so they are named in a .pth file.
    [ -x "$venv/bin/python" ] || "$python" -m venv --system-site-packages "$venv" ||
        die "$python cannot make a virtual environment; install its venv module (python3-venv) and run this again"
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib")); print(sysconfig.get_path("platlib"))' |
        sort -u >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer-environment.pth"
    has_torch "$venv/bin/python" || die "$venv does not see the PyTorch of $python; remove $venv and run this again"
elif [ ! -x "$venv/bin/python" ]; then
    if command -v uv >/dev/null; then
        uv venv --quiet --python "${PYTHON:-3.12}" "$venv" || die "uv could not make $venv with Python ${PYTHON:-3.12}"
    elif python=$(find_python true); then
        "$python" -m venv "$venv"
    else
        die "no Python 3.12 or newer and no uv on the PATH; install either, or set PYTHON=/path/to/python3.12"
    fi
fi

size=""
case $extras in torch*) size=" (PyTorch alone is about 5 GB on disk)" ;; esac
echo "bootstrap: installing into $venv$size"
# Bytecode is compiled now: each of a job's processes would otherwise spend ten seconds on it.
if command -v uv >/dev/null; then
    UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300} uv pip install --quiet --compile-bytecode --python "$venv/bin/python" -e ".[$extras]"
else
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
fi
echo "bootstrap: $("$venv/bin/python" -c 'import sys, torch; print(f"Python {sys.version.split()[0]}, PyTorch {torch.__version__}, in", sys.prefix)')"
