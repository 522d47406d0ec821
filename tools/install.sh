#!/bin/sh
# Installs nvpool on this machine: an environment of its own, commands on the PATH, units for systemd. Root.
#
# On return `nvpool`, `nvpoold` and mount(8)'s `mount.nvpool` are there, and the user nvpool; nothing is started. Repeating it
# updates (then: systemctl restart nvpoold, and systemctl reload 'nvpool-mount@*' for mounts that stay in use).
#
#   tools/install.sh              install or update
#   tools/install.sh --remove     take all of it away but pools, their configuration and their user
#
# PREFIX=/opt/nvpool says where the environment goes.
set -eu
cd "$(dirname "$0")/.."

prefix=${PREFIX:-/opt/nvpool}
units=/usr/local/lib/systemd/system

say() { printf 'install: %s\n' "$*" >&2; }

reload_systemd() {
    [ -d /run/systemd/system ] || return 0
    systemctl daemon-reload
}

if [ "$(id -u)" != 0 ]; then
    say 'this writes to /usr/local and /opt: please run it as root'
    exit 1
fi

if [ "${1:-}" = --remove ]; then
    rm -f "$units/nvpoold.service" "$units/nvpool-mount@.service" "$units/nvpool-bridge.service" "/usr/local/lib/sysusers.d/nvpool.conf" \
        "/usr/local/lib/tmpfiles.d/nvpool.conf" "/etc/udev/rules.d/60-nvpool.rules" \
        "/usr/local/bin/nvpool" "/usr/local/bin/nvpoold" "/sbin/mount.nvpool" "/sbin/mount.fuse.nvpool"
    rm -rf "${prefix:?}"
    reload_systemd
    say "removed; pools, /etc/nvpool and the user nvpool are left"
    exit 0
fi

python=$(sh tools/setup.sh --print-python)
[ -x "$prefix/bin/python" ] || "$python" -m venv "$prefix"
say "installing nvpool and what it needs from PyPI into $prefix"
"$prefix/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade '.[pyfuse3]'

mkdir -p "$units" "/usr/local/lib/sysusers.d" "/usr/local/lib/tmpfiles.d" "/etc/udev/rules.d" "/usr/local/bin" \
    "/sbin" "/etc/nvpool/mounts"
for command in nvpool nvpoold; do
    ln -sfn "$prefix/bin/$command" "/usr/local/bin/$command"
done
# mount(8) looks for the second where something mounted is remounted, since that is its type then.
for command in mount.nvpool mount.fuse.nvpool; do
    ln -sfn "$prefix/bin/mount.nvpool" "/sbin/$command"
done
for unit in nvpoold.service nvpool-mount@.service nvpool-bridge.service; do
    sed 's|/usr/bin/nvpool|/usr/local/bin/nvpool|g' "systemd/$unit" > "$units/$unit"
done
cp systemd/nvpool.sysusers "/usr/local/lib/sysusers.d/nvpool.conf"
cp systemd/nvpool.tmpfiles "/usr/local/lib/tmpfiles.d/nvpool.conf"
cp systemd/60-nvpool.rules "/etc/udev/rules.d/60-nvpool.rules"
[ -e "/etc/nvpool/nvpoold.conf" ] || cp systemd/nvpoold.conf "/etc/nvpool/nvpoold.conf"
[ -e "/etc/nvpool/bridge.conf" ] || cp systemd/bridge.conf "/etc/nvpool/bridge.conf"
if command -v systemd-sysusers >/dev/null 2>&1; then
    systemd-sysusers nvpool.conf
    systemd-tmpfiles --create nvpool.conf
fi
reload_systemd
say 'done. A pool: runuser -u nvpool -- nvpool pool create /var/lib/nvpool/pool --drive /mnt/nvme0   then: systemctl enable --now nvpoold'
