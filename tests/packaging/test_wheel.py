"""The wheel installs on bare systems without a compiler and serves a pool there."""

import subprocess
from pathlib import Path

import pytest

from tests.packaging import root_file_systems as systems

ROOT = Path(__file__).resolve().parents[2]

# Dates of a mirror are not checked: it may be ahead of this machine's clock, or a snapshot.
BUILD = """
apt-get update -qq -o Acquire::Check-Date=false -o Acquire::Check-Valid-Until=false >/dev/null
apt-get install -y -qq --no-install-recommends gcc libc6-dev python3-dev liburing-dev >/dev/null
cp -r /source /build
sh /build/tools/build_wheel.sh
cp /build/dist/* /out/
"""

USE = r"""
if command -v gcc || command -v cc; then
    echo 'a compiler is on the bare system'
    exit 1
fi
python3 -m venv /opt/nvpool
/opt/nvpool/bin/pip install --quiet --disable-pip-version-check --only-binary :all: /out/nvpool-*.whl
export PATH=/opt/nvpool/bin:$PATH
cd /
nvpool --version
nvpool dev up /srv/pool
nvpool status /srv/pool --check
python3 -c '
import nvpool
with nvpool.connect("/srv/pool") as pool:
    pool.write_bytes("/written", b"x" * 3_000_000)
    assert pool.read_bytes("/written") == b"x" * 3_000_000
'
nvpool fsck /srv/pool
mkdir -p /mnt/pool
nvpool mount /srv/pool /mnt/pool
head -c 3000000 /dev/zero | tr '\0' x | cmp - /mnt/pool/written
nvpool umount /mnt/pool
nvpool dev down /srv/pool
site=$(echo /opt/nvpool/lib/python3*/site-packages)
ls "$site"/nvpool.libs/liburing-*
find "$site/nvpool" -name '*.so' | wc -l
"""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(systems.missing() is not None, reason=str(systems.missing())),
]


@pytest.mark.parametrize("system", [systems.DEBIAN, systems.UBUNTU], ids=lambda system: system.suite)
def test_wheel_on_a_bare_system(system, tmp_path):
    if reason := systems.unreachable(system):
        pytest.skip(reason)
    source, out, base, srv = (tmp_path / name for name in ("source", "out", "base", "srv"))
    for directory in (source, out, srv):
        directory.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    systems.make_base(system, base)

    systems.run(base, tmp_path / "builder", BUILD, {source: "/source", out: "/out"})
    wheel, sdist = sorted(out.iterdir(), key=lambda path: path.suffix, reverse=True)
    python = f"cp{system.python.replace('.', '')}"
    assert f"-{python}-{python}-manylinux" in wheel.name
    assert sdist.name.endswith(".tar.gz")

    # The pool's drives lie on this machine's file system, as on a real node, and not on the overlay.
    said = systems.run(base, tmp_path / "bare", USE, {out: "/out", srv: "/srv"})
    compiled = len(list((ROOT / "nvpool").rglob("*.pyx")))
    compiled += len(
        [
            path
            for path in (ROOT / "nvpool").rglob("*.pxd")
            if path.with_suffix(".py").exists() and not path.with_suffix(".pyx").exists()
        ]
    )
    assert int(said.split()[-1]) == compiled
