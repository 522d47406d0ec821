"""The wheel installs on bare systems without a compiler and serves a pool there."""

import subprocess
from pathlib import Path

import pytest

from tests.packaging import root_file_systems as systems

ROOT = Path(__file__).resolve().parents[2]
CERTIFICATES = Path("/etc/ssl/certs")

BUILD = """
apt-get update -qq >/dev/null
apt-get install -y -qq --no-install-recommends gcc libc6-dev python3-dev liburing-dev >/dev/null
cp -r /source /build
sh /build/tools/build_wheel.sh
cp /build/dist/* /out/
"""

USE = """
! command -v gcc && ! command -v cc
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
cmp -n 3000000 /mnt/pool/written /mnt/pool/written
umount /mnt/pool
nvpool dev down /srv/pool
find /opt/nvpool -path '*nvpool*' -name '*.so' | wc -l
"""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(systems.missing() is not None, reason=str(systems.missing())),
]


@pytest.mark.parametrize("system", [systems.DEBIAN, systems.UBUNTU], ids=lambda system: system.suite)
def test_wheel_on_a_bare_system(system, tmp_path):
    source, out, base = tmp_path / "source", tmp_path / "out", tmp_path / "base"
    source.mkdir()
    out.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    systems.make_base(system, base)

    binds = {source: "/source", out: "/out", CERTIFICATES: "/etc/ssl/certs"}
    systems.run(base, tmp_path / "builder", BUILD, binds)
    wheel, sdist = sorted(out.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert f"cp{system.python.replace('.', '')}-manylinux_" in wheel.name
    assert sdist.name.endswith(".tar.gz")

    said = systems.run(base, tmp_path / "bare", USE, {out: "/out", CERTIFICATES: "/etc/ssl/certs"})
    compiled = len(list((ROOT / "nvpool").rglob("*.pyx")))
    assert int(said.split()[-1]) >= compiled
