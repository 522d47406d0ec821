"""What a 4 KiB read costs, layer by layer: one at a time, by subtraction of floors that lie in one another.

    road                          what is measured (p50)                                              key
    the kernel                    a read over FUSE, answered by two system calls (fuse_bare.py)       bare
    + the engine                  the same from nvpool's adapter and engine, out of memory            floor
    + the client                  the SDK's read without a mount                                      sdk
      of it: store and below      the same request, made beforehand, to the same store                raw
      of it: the wire             as many bytes, echoed by another process over the same transport    wire
      of it: the drive            a plain directory: O_DIRECT where it is cold, else the page cache   drive

kernel = bare, engine = floor - bare, client = sdk - raw, store = raw - wire - drive. By the short cut there is neither wire nor
store: client = sdk - drive. All of it adds up to what the mount takes, but for a remainder: what the parts do to one another
(processor caches, wake-ups, a look-out that finds nothing) and what a median of differences is not. A remainder below zero:
together they take less.
"""

from __future__ import annotations

LAYERS = ("kernel", "engine", "client", "wire", "store", "drive")
ROADS = ("stream", "short cut")
STATES = ("warm", "cold")


def split(p50_us: dict[str, float]) -> list[dict]:
    """A row for each road and state: µs of each layer, the remainder and the whole. `p50_us` has bare, floor, wire,
    "drive STATE", "raw STATE", and "sdk ROAD STATE" and "mount ROAD STATE"."""
    rows = []
    for road in ROADS:
        for state in STATES:
            drive, sdk = p50_us[f"drive {state}"], p50_us[f"sdk {road} {state}"]
            layers = {"kernel": p50_us["bare"], "engine": p50_us["floor"] - p50_us["bare"], "drive": drive}
            if road == "stream":
                raw = p50_us[f"raw {state}"]
                layers |= {"client": sdk - raw, "wire": p50_us["wire"], "store": raw - p50_us["wire"] - drive}
            else:
                layers |= {"client": sdk - drive, "wire": 0.0, "store": 0.0}
            whole = p50_us[f"mount {road} {state}"]
            rows.append({"road": road, "state": state, "layers": {name: layers[name] for name in LAYERS},
                         "remainder": whole - sum(layers.values()), "whole": whole})
    return rows


def name_of(row: dict) -> str:
    return f"mount, {row['road']}, {row['state']}"


def table(rows: list[dict]) -> str:
    text = ["| a 4 KiB read, one at a time, µs | " + " | ".join(LAYERS) + " | remainder | whole |",
            "|---|" + "---:|" * (len(LAYERS) + 2)]
    for row in rows:
        cells = [*(f"{row['layers'][name]:.1f}" for name in LAYERS), f"{row['remainder']:+.1f}", f"{row['whole']:.1f}"]
        text.append(f"| {name_of(row)} | {' | '.join(cells)} |")
    return "\n".join(text)
