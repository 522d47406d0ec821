"""What is compared, in the order of the table."""

from subjects.contract import Subject
from subjects.glusterfs import GlusterFS
from subjects.juicefs import JuiceFS
from subjects.local import CPassthrough, CSocket, FuseFromMemory, PlainDirectory
from subjects.moosefs import MooseFS
from subjects.pool import VARIANTS, Pool


def every_subject() -> list[Subject]:
    pools = (Pool(variant) for variant in VARIANTS)
    return [
        PlainDirectory(),
        FuseFromMemory(),
        CPassthrough(),
        CSocket(),
        *pools,
        GlusterFS(),
        MooseFS(),
        JuiceFS(),
    ]
