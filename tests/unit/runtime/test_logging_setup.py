"""Lines of a log: one for each message, whatever a peer has put into it."""

import json
import logging

import pytest

from nvpool.runtime import logging_setup


@pytest.fixture
def unchanged_log():
    """Restore this process's log when the test ends."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("form", ["text", "json"])
def test_message_can_not_forge_another_line(form, unchanged_log, capfd):
    logging_setup.start_log("meta-1", "info", None, form=form)
    log = logging.getLogger("nvpool.test")
    forged = "2026-01-01 00:00:00.000 ERROR   meta-1[1] forged"
    log.warning("connection with %s ended", f"a\r\n{forged}\x1b[2J\x9b2J\u2028ü")
    try:
        raise ValueError(f"no\n{forged}")
    except ValueError:
        log.exception("failed")
    lines = capfd.readouterr().err.rstrip("\n").split("\n")
    if form == "json":
        assert [json.loads(line)["message"].split()[0] for line in lines] == ["connection", "failed"]
        return
    assert not any(line.startswith("2026-01-01") for line in lines)
    assert lines[0].endswith(f"connection with a\\r\\n{forged}\\x1b[2J\\x9b2J\\u2028ü ended")
    assert lines[1].endswith("failed") and lines[2] == "  Traceback (most recent call last):"
    assert lines[-1] == f"  {forged}"
