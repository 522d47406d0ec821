"""Sizes and limits shared by the whole pool. Changing one is a change of format."""

import re

Buffer = bytes | bytearray | memoryview
"""Bytes that are read or written without a copy. The items must be bytes."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

BLOCK_BYTES = 4096
BLOCK_BITS = 12
"""Unit of checksums and of allocation: the page size of the kernel and the sector size of current NVMe
drives."""

CHUNK_BYTES_DEFAULT = MIB
CHUNK_BYTES_MIN = 64 * KIB
CHUNK_BYTES_MAX = 16 * MIB

CHAINS_PER_TABLE = 1024
PARTITION_COUNT = 4096
PARTITION_BITS = 12
SLOTS_PER_SESSION = 64

WITHDRAW_ANY = (1 << 64) - 1
"""ReportRequest.withdrawn of a client that lost the reply and so does not know where its reservation ends."""

NAME_BYTES_MAX = 255
SYMLINK_BYTES_MAX = 4095
XATTR_NAME_BYTES_MAX = 255
XATTR_VALUE_BYTES_MAX = 65536
LINK_COUNT_MAX = 1_000_000

FILE_BYTES_MAX = 1 << 50
"""Largest file. 2**32 chunks of the smallest size are 256 TiB. With the default chunk size, the chunk index
(u32) suffices for a petabyte; `layout` checks the product for smaller chunks."""

TIME_NS_MIN, TIME_NS_MAX = -(1 << 63), (1 << 63) - 1
"""Range of a timestamp, in nanoseconds since 1970: from 1677-09-21 to 2262-04-11. Records and messages store
64 bits."""


def clamp_time_ns(time_ns: int) -> int:
    """Return the nearest timestamp that can be stored, as Linux file systems do in `utimensat`."""
    return min(max(time_ns, TIME_NS_MIN), TIME_NS_MAX)


_SUFFIXES = {
    "": 1,
    "B": 1,
    "K": KIB,
    "KB": KIB,
    "KIB": KIB,
    "M": MIB,
    "MB": MIB,
    "MIB": MIB,
    "G": GIB,
    "GB": GIB,
    "GIB": GIB,
    "T": TIB,
    "TB": TIB,
    "TIB": TIB,
}
_SIZE = re.compile(r"([0-9]{0,30})(?:\.([0-9]{0,30}))? *([KMGT]?I?B?)")


def parse_bytes(text: str) -> int:
    """Return the bytes of a size as people write it: '4096', '64K', '1MiB', '1.5G'.

    Suffixes are binary (1K = 1024). The result is rounded down to a whole byte. A size above 0 never becomes
    0, which means "no limit" in many places.
    ValueError: the text is not a size or is out of range, and the error says why. Nothing else is raised.
    """
    found, shown = _SIZE.fullmatch(text.strip().upper()), repr(text) if len(text) <= 80 else f"{text[:40]!r}…"
    digits = f"{found[1]}{found[2] or ''}" if found is not None else ""
    if found is None or not digits or found[3] not in _SUFFIXES:
        raise ValueError(f"{shown} is not a size; write it like 4096, 64K, 1MiB or 1.5G")
    dividend, divisor = int(digits) * _SUFFIXES[found[3]], 10 ** len(found[2] or "")
    amount: int = dividend // divisor
    if amount >= 1 << 63 or (not amount and dividend):
        raise ValueError(f"{shown} is out of range: a size is 0, or from one byte on and less than 8 EiB")
    return amount


def format_bytes(count: float) -> str:
    """Return `count` bytes with three significant digits and a binary suffix: '1.50 GiB'."""
    for suffix in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or suffix == "TiB":
            break
        count /= 1024
    if suffix == "B":
        return f"{int(count)} B"
    return f"{count:.{2 if abs(count) < 10 else 1 if abs(count) < 100 else 0}f} {suffix}"


def size_argument(count: int) -> str:
    """Return `count` bytes as an argument of a command, exactly: '1GiB', '1536MiB', '4097'. `parse_bytes` reads it."""
    for size, suffix in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count and count % size == 0:
            return f"{count // size}{suffix}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """Return a duration in two units at most: '3d 4h', '12 s'."""
    whole = max(0, round(seconds))
    for size, name, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"
