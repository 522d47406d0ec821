"""CRC-32C of the C header that all compiled modules share: by the processor's instruction and by tables."""

import ctypes
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nvpool.core
from nvpool.core.checksum import crc32c
from nvpool.core.primitives import crc32c_of

SOURCE = """
#include "_crc.h"
void begin(int by_table) { crc_begin(by_table); }
uint32_t crc(const uint8_t *bytes, size_t count) { return crc_of(bytes, count); }
"""


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """The header, compiled into a library."""
    place = tmp_path_factory.mktemp("crc")
    (place / "crc.c").write_text(SOURCE)
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    headers = Path(nvpool.core.__file__).parent
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", f"-I{headers}", "-o", place / "crc.so", place / "crc.c"],
        check=True,
    )
    library = ctypes.CDLL(str(place / "crc.so"))
    library.crc.argtypes, library.crc.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_uint32
    return library


@pytest.mark.compiled
@given(st.binary(max_size=300), st.booleans())
def test_checksum_of_the_header_equals_crc32c(header, some, by_table):
    header.begin(by_table)
    assert header.crc(some, len(some)) == crc32c(some)


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 400))
def test_checksum_of_a_part_equals_crc32c(some, first, end):
    assert crc32c_of(some, first) == crc32c(some[first:])
    assert crc32c_of(some, first, end) == crc32c(some[first:end])
