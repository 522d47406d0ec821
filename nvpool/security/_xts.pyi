from collections.abc import Callable, Sequence

from nvpool.core.units import Buffer

class XtsScratch:
    def __init__(
        self, tweak_into: Callable[[Buffer, Buffer], int], data_into: Callable[[Buffer, Buffer], int]
    ) -> None: ...
    def run_many(
        self, pieces: Sequence[tuple[int, int, int, int, int]], into: bytearray | memoryview
    ) -> None: ...
    def run(
        self,
        source: Buffer,
        to: bytearray | memoryview,
        inode: int,
        index: int,
        first: int,
        keeps_zeros: bool,
    ) -> None: ...
