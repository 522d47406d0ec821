"""Systems compared, in table order."""

from subjects.contract import Subject
from subjects.glusterfs import GlusterFS
from subjects.juicefs import JuiceFS
from subjects.local import CPassthrough, CSocket, FuseFromMemory, PlainDirectory
from subjects.moosefs import MooseFS
from subjects.pool import VARIANTS, Pool
from subjects.seaweedfs import SeaweedFS


def every_subject(copies: int = 1) -> list[Subject]:
    """Drive, floors, nvpool and peers with so many copies of each byte.

    With two copies, only the variants of nvpool that have a column.
    """
    floors = [PlainDirectory(), FuseFromMemory(), CPassthrough(), CSocket()]
    if copies > 1:
        pools = [Pool(variant, copies=copies) for variant in VARIANTS if variant.column]
    else:
        pools = [Pool(variant) for variant in VARIANTS]
    return [*floors, *pools, GlusterFS(copies), MooseFS(copies), JuiceFS(copies), SeaweedFS(copies)]
