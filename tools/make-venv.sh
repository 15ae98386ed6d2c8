#!/bin/sh
# Makes .venv with Python 3.11 or newer and installs the project into it, editable, with the tools of its tests.
# Called by the Makefile when .venv is missing or older than pyproject.toml. PYTHON=/path/to/python chooses another one.
set -eu
cd "$(dirname "$0")/.."

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

can_make_venvs() {
    # Debian ships `venv` with python3 itself, but keeps `ensurepip`, which venv needs, in a package of its own.
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

# Choosing a Python

python=${PYTHON:-}
if [ -n "$python" ]; then
    is_new_enough "$python" || fail "PYTHON=$python is not a Python 3.11 or newer."
else
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if is_new_enough "$candidate"; then
            python=$candidate
            break
        fi
    done
    found=$(python3 --version 2>/dev/null || echo "no python3 at all")
    [ -n "$python" ] || fail "hermes-sidecar needs Python 3.11 or newer; this machine has $found." \
        "Install one (Debian 12 or newer: apt-get install python3 python3-venv)," \
        "or name one that is not on the PATH: make PYTHON=/path/to/python3.11 ..."
fi

# Making the environment, unless a usable one is there

if ! { is_new_enough .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; }; then
    if ! can_make_venvs "$python"; then
        package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
        command -v apt-get >/dev/null 2>&1 ||
            fail "$python cannot make virtual environments: its module ensurepip is missing. Install it, then try again."
        [ "$(id -u)" -eq 0 ] ||
            fail "$python cannot make virtual environments yet. Run this once, then try again:" \
                "  sudo apt-get install $package"
        echo "Installing $package, which $python needs to make virtual environments"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y -o Dpkg::Use-Pty=0 --no-install-recommends "$package"
        can_make_venvs "$python" ||
            fail "$package is installed, but $python still lacks ensurepip: it is probably not Debian's own Python." \
                "Choose another one: make PYTHON=/usr/bin/python3 ..."
    fi
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

echo "Installing hermes-sidecar and its tools into .venv (a minute or so, once)"
# pip would compile the hot path as well, for itself alone; `make compiled` does it with what .venv has (tools/compile.py).
SIDECAR_COMPILE=never .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,docs]'
touch .venv/.ready
