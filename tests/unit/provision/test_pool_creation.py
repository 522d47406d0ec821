"""Checks before anything of a pool is created."""

import json
import os
import subprocess

import pytest

from nvpool.core.errors import InvalidRequest, NoSpace
from nvpool.core.programs import Program, command
from nvpool.provision.create import capacity_for, store_path


@pytest.mark.parametrize(("wanted", "refusal"), [(1 << 62, NoSpace), (4096, InvalidRequest)])
def test_invalid_size_is_refused_with_the_drives_path(tmp_path, wanted, refusal):
    place = store_path(str(tmp_path), "", 0, None)
    with pytest.raises(refusal) as refused:
        capacity_for(place, wanted)
    assert f"drive {tmp_path}:" in str(refused.value)


def test_vanished_caller_causes_no_traceback():
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
