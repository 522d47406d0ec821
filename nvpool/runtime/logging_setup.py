"""Logging of a program: destination, format, and changes of the level while it runs.

Used by the programs at their start, and by runtime/daemon_process on SIGHUP. Python's own crash output goes
to the same place.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import logging
import logging.handlers
import os
from pathlib import Path
from typing import Any

from nvpool.host.log_files import log_opener

log = logging.getLogger("nvpool.runtime")

_again: Path | None = None
"""The node.toml with the log settings of this process."""


_CONTROLS = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
} | {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
"""Control characters and line ends, with what a line of text shows in their place."""


class _Lines(logging.Formatter):
    """Formatter with one line of text per message.

    A text that a peer has sent can neither begin another line nor send control codes to a terminal. A
    traceback follows on lines of its own, each with a margin.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {name}[%(process)d] %(message)s", "%Y-%m-%d %H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROLS)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(["  " + line.translate(_CONTROLS) for line in lines])


class _LogFile(logging.handlers.WatchedFileHandler):
    """Log file handler: each new file is readable by its owner and group only."""

    def _open(self):
        return open(
            self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=log_opener
        )


class _Objects(logging.Formatter):
    """Formatter with one JSON object per line.

    The keys are stable: time (RFC 3339, UTC), level, process, pid, logger, message; error if there is a
    traceback.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(
            timespec="milliseconds"
        )
        entry = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._name,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def start_log(
    name: str, level: str, path: Path | None, *, form: str = "text", node_toml: Path | None = None
) -> None:
    """Send all log output to `path` or stderr, as lines of text or JSON.

    The file is opened again after it was moved away. With `node_toml`, `follow_settings` reads the level from
    that file.
    """
    global _again
    _again = node_toml
    if path is not None:
        kept: logging.Handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
        descriptor = log_opener(os.fspath(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    else:
        kept = logging.StreamHandler()
    kept.setFormatter(_Objects(name) if form == "json" else _Lines(name))
    logging.basicConfig(level=level.upper(), handlers=[kept], force=True)
    faulthandler.enable()


def follow_settings() -> None:
    """Apply the present log level of node.toml. If it cannot be read, keep the level and log a warning."""
    if _again is None:
        return
    from nvpool.core.config import load  # imported here: the holder, which does not need it, must stay small
    from nvpool.core.errors import NvpoolError

    try:
        level = load(_again).log.level
    except NvpoolError as error:
        log.warning("the level of the log stays: %s", error)
        return
    logging.getLogger().setLevel(level.upper())
    log.info("the level of the log is %s", level)
