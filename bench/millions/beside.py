"""Program that makes the records of a tree for millions/build, which reads its standard output.

python -m millions.beside FILES PER_DIRECTORY NAME_KEY ROOT
"""

from __future__ import annotations

import contextlib
import marshal
import sys
from collections.abc import Iterator
from itertools import chain

from nvpool.core.ids import ROOT_INODE
from nvpool.meta.state import records
from nvpool.poolmap.file_layout import Layout

from .tree import Records, Tree


def batches(tree: Tree, root: records.Inode) -> Iterator[tuple[float, Records]]:
    """Batches of (share of the work, records); the shares add up to 1."""
    return chain([(0.0, tree.few(root))], tree.batches())


def described(tree: Tree, root: records.Inode) -> list[str]:
    """Return the arguments of this program."""
    return [str(tree.files), str(tree.per_directory), tree.name_key.hex(), records.encode_inode(root).hex()]


def main(words: list[str]) -> None:
    files, per_directory, name_key, encoded = words
    root = records.decode_inode(ROOT_INODE, bytes.fromhex(encoded))
    tree = Tree(int(files), int(per_directory), bytes.fromhex(name_key), Layout(root.table, root.chunk_bits))
    with contextlib.suppress(BrokenPipeError), open(sys.stdout.fileno(), "wb", closefd=False) as pipe:
        for batch in chain(batches(tree, root), (None,)):
            raw = marshal.dumps(batch)
            pipe.write(len(raw).to_bytes(8, "little") + raw)
            pipe.flush()  # shares of work without records are small


if __name__ == "__main__":
    main(sys.argv[1:])
