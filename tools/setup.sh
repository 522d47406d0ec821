#!/bin/sh
# Makes this checkout ready to run: Debian packages, .venv, nvpool installed editable with its compiled module.
#
# On return .venv/bin/python runs nvpool and its tests. Repeating it costs a moment when nothing is to do. It may be stopped
# at any time and begun again. What it installs on the machine it says first; without root it changes nothing outside this
# directory and prints the one command that somebody with root has to run.
#
#   tools/setup.sh                  set up
#   tools/setup.sh --print-python   only print a Python that runs here (for `make clean`, which must work before any set-up)
#
# PYTHON=/path/to/python3 chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/nvpool-setup.stamp
log=$venv/nvpool-setup.log

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }

# Prints the first Python that is at least 3.11; with "whole", one that also can compile and make environments. The
# distribution's before what is first on the PATH: it is optimized with a profile, and one that somebody has compiled without
# (as pyenv does) takes half as long again for all that nvpool does.
find_python() {
    for python in ${PYTHON:-} .venv/bin/python /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do
        path=$(command -v "$python" 2>/dev/null) || continue
        if "$path" -c '
import os, sys, sysconfig
assert sys.version_info >= (3, 11)
if sys.argv[1] == "whole":
    import ensurepip, venv
    assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))  # not the one of an environment that happens to be active
' "$1" 2>/dev/null; then
            return 0
        fi
    done
    return 1
}

if [ "${1:-}" = --print-python ]; then
    find_python any || command -v python3 || fail 'there is no python3 here; what is to be removed? rm -r .venv removes the environment'
    exit 0
fi

# Two set-ups at the same time would undo one another; the second waits and then finds nothing to do.
exec 9<Makefile
flock 9

# -- packages of the machine -----------------------------------------------------------------------------------------

# What building and mounting needs, and what the tests run on the mount.
packages='fuse3 libfuse3-dev pkg-config gcc libc6-dev liburing-dev git rsync tar fio sqlite3 xfsprogs iproute2 etcd-server strace docker.io podman busybox-static prometheus systemd acl debootstrap'
if [ "$(id -u)" = 0 ] || ! find_python whole >/dev/null; then
    packages="$packages python3 python3-dev python3-venv"
fi

missing=
if command -v dpkg-query >/dev/null 2>&1; then
    for package in $packages; do
        case $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true) in
            *' installed') ;;
            *) missing="$missing $package" ;;
        esac
    done
else
    # Not Debian: look for what the packages bring.
    for command in fusermount3 pkg-config gcc git rsync tar fio sqlite3 etcd dockerd podman busybox prometheus setfacl; do
        command -v $command >/dev/null 2>&1 || missing="$missing $command"
    done
    pkg-config --exists fuse3 2>/dev/null || missing="$missing libfuse3(headers)"
    [ -z "$missing" ] || fail "please install:$missing (this is not Debian, so we do not know your packages' names)"
fi

if [ -n "$missing" ]; then
    if [ "$(id -u)" != 0 ]; then
        say 'some Debian packages are missing. Please run this, then the same make again:'
        echo "sudo apt-get update && sudo apt-get install --yes --no-install-recommends$missing"
        exit 1
    fi
    say "installing Debian packages:$missing"
    export DEBIAN_FRONTEND=noninteractive
    export SYSTEMD_OFFLINE=1  # no service begins that nobody has asked for
    install() { apt-get install --yes --no-install-recommends -qq -o DPkg::Lock::Timeout=120 $missing >/dev/null; }
    # The package lists may be absent or old; fetching them is slow, so only then.
    install 2>/dev/null || { apt-get update -qq >&2 && install >&2; } || fail "apt-get could not install:$missing"
    unset SYSTEMD_OFFLINE
    case $missing in
        *etcd-server*) systemctl disable --quiet etcd.service 2>/dev/null || true ;;  # nor with the next start of the machine
    esac
    case $missing in
        *docker.io*) systemctl disable --quiet docker.service docker.socket containerd.service 2>/dev/null || true ;;
    esac
    case $missing in
        *podman*) systemctl disable --quiet podman.service podman.socket podman-restart.service podman-auto-update.timer \
            podman-auto-update.service 2>/dev/null || true ;;
    esac
    case $missing in
        *prometheus*) systemctl disable --quiet prometheus.service 2>/dev/null || true ;;
    esac
fi

# -- .venv -----------------------------------------------------------------------------------------------------------

python=$(find_python whole) || fail 'no Python 3.11 or later with headers and venv is here; PYTHON=/path/to/python3 names one'

# What the environment was made from; when all of it is the same, there is nothing to do.
typed=$(find nvpool -name '*.pxd' | sed 's/pxd$/py/')  # modules with C types are compiled too
sources=$(find pyproject.toml setup.* tools/setup.sh tools/dependency_groups.py nvpool -name '*.toml' -o -name 'setup.*' -o -name '*.p[yx][xd]' -o \
    -name '*.[ch]' ! -name '_*.c' 2>/dev/null | sort) || true  # there need not be a setup.py
wanted="$PWD $python $(cat $sources $typed 2>/dev/null | sha256sum)"
if [ "$(cat $stamp 2>/dev/null)" = "$wanted" ] && $venv/bin/python -c 'import nvpool' 2>/dev/null; then
    exit 0
fi

# An environment that was moved, or made by another Python, is created again: its programs name the old place.
if ! grep -qs "^command = .* $PWD/$venv\$" $venv/pyvenv.cfg ||
        [ "$($venv/bin/python -c 'import os, pip, sys; print(os.path.realpath(sys._base_executable))' 2>/dev/null)" != "$python" ]; then
    say "making $venv with $("$python" --version) from $python"
    "$python" -m venv --clear $venv
fi
rm -f $stamp
say 'installing nvpool and what it needs from PyPI into .venv'
groups=$venv/nvpool-setup-groups.txt
$venv/bin/python tools/dependency_groups.py dev >$groups
if ! $venv/bin/python -m pip install --disable-pip-version-check --no-input --editable '.[rdma,pyfuse3]' -r $groups >$log 2>&1; then
    tail -n 30 $log >&2
    fail "pip could not install; the whole log is in $log"
fi
# The recorder of writes and syncs for the power-loss tests is a preloaded library, not a Python module.
$venv/bin/python -c 'from nvpool.testing.faults.preload import build_library; build_library()' >>$log 2>&1 || {
    tail -n 30 $log >&2
    fail 'the library for faults on purpose does not compile'
}
printf '%s\n' "$wanted" >$stamp
say 'ready'
