"""What is refused before anything of a pool is made."""

import json
import os
import subprocess

import pytest

from nvpool.core.errors import InvalidRequest, NoSpace
from nvpool.core.programs import Program, command
from nvpool.provision.create import capacity_for, store_path


@pytest.mark.parametrize(("wanted", "refusal"), [(1 << 62, NoSpace), (4096, InvalidRequest)])
def test_a_size_that_makes_no_sense_is_refused_by_the_name_of_the_drive_that_is_there(
    tmp_path, wanted, refusal
):
    place = store_path(str(tmp_path), "", 0, None)
    with pytest.raises(refusal) as told:
        capacity_for(place, wanted)
    assert f"drive {tmp_path}:" in str(told.value)


def test_who_asked_and_is_gone_leaves_no_traceback():
    reads, writes = os.pipe()
    os.close(reads)
    request = {"verb": "check", "path": "/nowhere", "directory": "/nowhere", "pool_id": "", "target": 0}
    done = subprocess.run(
        command(Program.POOL_MAKER),
        input=json.dumps(request).encode(),
        stdout=writes,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, b"")
