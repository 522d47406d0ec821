"""Cost of a 4 KiB read by layer: one at a time, by subtraction of floors of the same run.

    path                          what is measured (p50)                                              key
    the kernel                    a read over FUSE, answered by two system calls (fuse_bare.py)       bare
    + the engine                  the same from nvpool's adapter and engine, out of memory            floor
    below: the drive              a plain directory: O_DIRECT where it is cold, else the page cache   drive
    below, over stream: the store a read made beforehand, asked of the store by the SDK's connection  raw
      of it: the wire             as many bytes, echoed by another process over the same transport    wire
    the whole                     a read through the mount; and by the SDK, which has no kernel       mount, sdk

kernel = bare, engine = floor - bare, store = raw - wire - drive, and client is the rest of the whole: for a mount all
other work of its process, and the effects of the parts on one another (processor caches, wake-ups). A read that is
compiled in one step with the engine may make it negative. Short-circuit reads have neither wire nor store.
"""

from __future__ import annotations

LAYERS = ("kernel", "engine", "client", "wire", "store", "drive")
ROADS = ("stream", "short cut")
STATES = ("warm", "cold")


def split(p50_us: dict[str, float]) -> list[dict]:
    """A row for mount and SDK, each path and each state: µs of each layer, and the whole.

    `p50_us` has bare, floor, wire, "drive STATE", "raw STATE", and "sdk PATH STATE" and "mount PATH STATE".
    """
    rows = []
    for who in ("mount", "sdk"):
        for road in ROADS:
            for state in STATES:
                layers = dict.fromkeys(LAYERS, 0.0) | {"drive": p50_us[f"drive {state}"]}
                if who == "mount":
                    layers |= {"kernel": p50_us["bare"], "engine": p50_us["floor"] - p50_us["bare"]}
                if road == "stream":
                    layers |= {
                        "wire": p50_us["wire"],
                        "store": p50_us[f"raw {state}"] - p50_us["wire"] - layers["drive"],
                    }
                whole = p50_us[f"{who} {road} {state}"]
                layers["client"] = whole - sum(layers.values())
                rows.append({"who": who, "road": road, "state": state, "layers": layers, "whole": whole})
    return rows


def name_of(row: dict) -> str:
    return f"{'SDK' if row['who'] == 'sdk' else row['who']}, {row['road']}, {row['state']}"


def table(rows: list[dict]) -> str:
    text = [
        "| a 4 KiB read, one at a time, µs | " + " | ".join(LAYERS) + " | whole |",
        "|---|" + "---:|" * (len(LAYERS) + 1),
    ]
    for row in rows:
        cells = [*(f"{row['layers'][name]:.1f}" for name in LAYERS), f"{row['whole']:.1f}"]
        text.append(f"| {name_of(row)} | {' | '.join(cells)} |")
    return "\n".join(text)
