"""The drive that a command line names: a number, a path, or a word that is neither."""

import pytest

from nvpool.cli.commands.drive import drive_name
from nvpool.core.errors import NotFound
from nvpool.node.admin.drives import find
from nvpool.testing.contracts.coordinator import first_map


def test_word_that_is_no_path_is_sent_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert (drive_name("x"), drive_name("2")) == ("x", "2")
    assert (drive_name("there"), drive_name("no/where")) == (
        str(tmp_path / "there"),
        str(tmp_path / "no/where"),
    )


def test_drive_is_found_by_number_and_path():
    assert find(first_map(), {"drive": "2"}, 1).id == find(first_map(), {"drive": "/drive/2"}, 1).id == 2


@pytest.mark.parametrize("name", ["x", "9", "/drive/9"])
def test_unknown_drive_error_names_the_drives_there_are(name):
    drives = r"1 \(/drive/1 of node 1\), 2 \(/drive/2 of node 1\)"
    with pytest.raises(NotFound, match=f"no drive {name}; its drives are {drives}$"):
        find(first_map(), {"drive": name}, 1)
