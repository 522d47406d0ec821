"""Data moved by a new drive, and the balance afterwards. Called by nodes.py.

A chunk has moved when its chain has a new member. The least that has to move is the share of the new drive in the
capacity of all drives. Used space is what the stores report after they have freed the chunks that moved away. That
takes a minute, because readers with an older map may still ask for them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from subjects.contract import Failed, run
from workspace import say

from nvpool.core.programs import Program, command
from nvpool.core.units import MIB
from nvpool.poolmap.file_layout import chain_of
from nvpool.testing.env.pool import RealPool

CASES = {
    "three drives of 1 GiB, one of 1 GiB added": ((1024,) * 3, 1024),
    "drives of 512, 1024 and 2048 MiB, one of 1024 MiB added": ((512, 1024, 2048), 1024),
}
FULL = 0.35
"""Share of the earlier capacity that is written."""
SETTLED_S = 300.0


def balance(directory: Path, options) -> dict:
    rows = []
    for number, (case, (sizes, added)) in enumerate(CASES.items()):
        for _ in range(1 if options.quick else options.rounds):
            rows.append(added_to(directory / f"balance-{number}-{len(rows)}", case, sizes, added))
            say(
                f"{case}: {rows[-1]['moved']} chunks of {rows[-1]['chunks']} moved, {rows[-1]['least']:.0f} had to; used "
                f"{', '.join(f'{share:.1%}' for share in rows[-1]['used'])}"
            )
    return {"rows": rows}


def added_to(directory: Path, case: str, sizes: tuple[int, ...], added: int) -> dict:
    directory.mkdir()
    with RealPool(directory / "pool", sizes=tuple(size * MIB for size in sizes)) as pool:
        pool.make()
        pool.start()
        client, inodes = pool.connect(), {}
        count = round(sum(sizes) * FULL) // 8
        for number in range(count):  # files of 8 chunks
            client.write_bytes(f"/f{number}", number.to_bytes(8, "little") * (MIB // 8) * 8)
            inodes[number] = client.stat(f"/f{number}").st_ino
        client.close()
        before = pool.pool_map.tables[0].chains
        written = sum(drive["used_bytes"] for drive in pool.status()["drives"])
        (directory / "new").mkdir()
        nvpool = command(Program.CLI)
        run(
            *nvpool,
            "drive",
            "add",
            pool.path,
            directory / "new",
            "--size",
            f"{added}M",
            "--wait",
            timeout_s=600,
        )
        after = pool.pool_map.tables[0].chains
        moved = sum(
            not set(after[chain].targets) <= set(before[chain].targets)
            for inode in inodes.values()
            for chain in (chain_of(inode, index) for index in range(8))
        )
        drives = settled(pool, written)
        return {
            "case": case,
            "chunks": count * 8,
            "moved": moved,
            "least": count * 8 * added / (sum(sizes) + added),
            "used": [drive["used_bytes"] / drive["capacity_bytes"] for drive in drives],
        }


def settled(pool: RealPool, written: int) -> list[dict]:
    """Return the drives when no chunk lies on two of them any more."""
    end = time.monotonic() + SETTLED_S
    while True:
        drives = pool.status()["drives"]
        if sum(drive["used_bytes"] for drive in drives) < written * 1.02:
            return drives
        if time.monotonic() > end:
            raise Failed(f"what moved away is not given back: {json.dumps(drives)}")
        time.sleep(0.5)
