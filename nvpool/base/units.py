"""Sizes and limits that the whole pool agrees on. Changing one is a change of format."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

BLOCK_BYTES = 4096
BLOCK_BITS = 12
"""Unit of checksums and of allocation: the page of the kernel and the sector of current NVMe drives."""

CHUNK_BYTES_DEFAULT = MIB
CHUNK_BYTES_MIN = 64 * KIB
CHUNK_BYTES_MAX = 16 * MIB

CHAINS_PER_TABLE = 1024
PARTITION_COUNT = 4096
PARTITION_BITS = 12
SLOTS_PER_SESSION = 64

NAME_BYTES_MAX = 255
SYMLINK_BYTES_MAX = 4095
XATTR_NAME_BYTES_MAX = 255
XATTR_VALUE_BYTES_MAX = 65536
LINK_COUNT_MAX = 1_000_000

FILE_BYTES_MAX = 1 << 50
"""2**32 chunks of the smallest size are 256 TiB; a petabyte in one file is where the chunk index (u32) still
holds with the default chunk size, and `layout` checks the product for smaller chunks."""

_SUFFIXES = {"": 1, "B": 1, "K": KIB, "KB": KIB, "KIB": KIB, "M": MIB, "MB": MIB, "MIB": MIB, "G": GIB, "GB": GIB,
             "GIB": GIB, "T": TIB, "TB": TIB, "TIB": TIB}


def parse_bytes(text: str) -> int:
    """Bytes of a size as people write it: '4096', '64K', '1MiB', '1.5G'. Suffixes are binary (1K = 1024).

    ValueError says what was wrong; nothing else is raised.
    """
    stripped = text.strip().upper()
    digits = stripped.rstrip("KMGTIB")
    suffix = stripped[len(digits):].strip()
    try:
        factor = _SUFFIXES[suffix]
        amount = float(digits) * factor
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is not a size; write it like 4096, 64K, 1MiB or 1.5G") from None
    if not 0 <= amount < 1 << 63 or amount != amount:
        raise ValueError(f"{text!r} is out of range")
    return int(amount)


def format_bytes(count: float) -> str:
    """`count` bytes with three significant digits and a binary suffix: '1.50 GiB'."""
    for suffix in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or suffix == "TiB":
            break
        count /= 1024
    if suffix == "B":
        return f"{int(count)} B"
    return f"{count:.{2 if abs(count) < 10 else 1 if abs(count) < 100 else 0}f} {suffix}"
