"""Audit log of a node: who changed the pool or was refused, from where, when and with which result.

security/audit_format defines the form of a line. The file has mode 0640. The same text goes to the process's
own log and, under systemd, to the journal. Several daemons of a node append to one file; each line is one
write(2). A file of BYTES_MAX is renamed, and KEPT older ones stay. Nobody can displace the records of others:
refusals and failures are rate-limited together (a burst of REFUSED_MAX, then one a second), and so is what one
actor without the rights of a node has done (a burst of DONE_MAX). `left_out` counts what is missing.

`note` never blocks and never raises: a thread writes, from a queue of QUEUE_MAX. A line is not synced; after
a power failure the last ones may be missing. Used by runtime/audit_events.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import logging
import os
import pwd
import queue
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.containers.rate_limits import RateLimits
from nvpool.host.log_files import log_opener
from nvpool.security.audit_format import KEPT, TEXT_MAX, line_of, older, without_secrets

BYTES_MAX = 8 << 20
QUEUE_MAX = 1000
REFUSED_MAX = 60
DONE_MAX = 600
"""Burst for each client or local user. At one a second the log then holds a day and a half of one actor."""
CLOSE_S, LOCK_S = 2.0, 1.0
_JOURNAL = "/run/systemd/journal/socket"
_NOTICE = 5
"""PRIORITY of syslog(3)."""
_NO_LOGIN = (1 << 32) - 1
"""Value of /proc/PID/loginuid for processes without a login."""

log = logging.getLogger("nvpool.audit")


class Actor(NamedTuple):
    """Originator of a request: a member of the pool by its certificate, or a local process by its
    credentials."""

    member: str = ""
    uid: int | None = None
    pid: int = 0
    address: str = ""


class AuditLog:
    """Audit log of one process, `name`.

    `lock` is a file beside run/ that the processes of the node lock while they rename the log.
    """

    def __init__(self, path: Path, lock: Path, name: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path = path
        self._lock = lock
        self._name = name
        self._clock = clock
        self._waiting: queue.Queue[tuple[dict[str, Any], Actor] | None] = queue.Queue(QUEUE_MAX)
        self._thread: threading.Thread | None = None
        self._left_out = 0
        self._refused = RateLimits(REFUSED_MAX, 1.0, clock)
        self._done = RateLimits(DONE_MAX, 1.0, clock)
        self._trouble = ""
        self._pause = threading.Event()
        """Never set: waiting for it is a sleep."""

    def note(
        self,
        event: str,
        actor: Actor,
        what: Mapping[str, Any],
        error: BaseException | None = None,
        *,
        refused: bool = False,
    ) -> None:
        """Record that `actor` requested `what`.

        `error`: why it was not done. `refused`: it was not allowed.
        """
        result = "refused" if refused else "done" if error is None else "failed"
        if not (self._refused.take() if result != "done" else self._may_note_done(actor)):
            self._left_out += 1
            return
        record: dict[str, Any] = {
            "time": _time(self._clock),
            "event": event,
            "result": result,
            "process": self._name,
            "what": without_secrets(what),
        }
        if error is not None:
            record["error"] = str(error)[:TEXT_MAX]
        if self._left_out:
            record["left_out"], self._left_out = self._left_out, 0
        try:
            self._waiting.put_nowait((record, actor))
        except queue.Full:
            self._left_out += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
            self._thread.start()

    def _may_note_done(self, actor: Actor) -> bool:
        if actor.member.startswith("node/") or (not actor.member and actor.uid in (0, os.geteuid())):
            return True
        return self._done.take(actor.member or ("unknown" if actor.uid is None else f"uid {actor.uid}"))

    def close(self) -> None:
        """Write the queued records, for at most CLOSE_S."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
            self._thread = None

    # -- in the writer thread --------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (found := self._waiting.get()) is not None:
            record, actor = found
            record |= {"who": _who(actor), "from": "unix" if actor.uid is not None else actor.address}
            line = line_of(record)
            try:
                self._write(line)
                self._trouble = ""
            except OSError as error:
                if str(error) != self._trouble:  # log each reason once
                    self._trouble = str(error)
                    log.error("the audit log %s cannot be written: %s", self._path, error.strerror or error)
            text = line.decode()
            log.info("%s", text)
            _send_to_journal(record, text)

    def _write(self, line: bytes) -> None:
        descriptor = log_opener(os.fspath(self._path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_size >= BYTES_MAX and self._rotate():
                os.close(descriptor)
                descriptor = -1
                descriptor = log_opener(os.fspath(self._path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, line + b"\n")
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _rotate(self) -> bool:
        """Rename the log, unless another process already has; return whether to open it again.

        Waits LOCK_S for a process that is stopped in the middle of a rename; after that the log continues to
        grow.
        """
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not self._is_locked(lock):
                return False
            if self._path.stat().st_size < BYTES_MAX:
                return True
            for number in range(KEPT - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(older(self._path, number), older(self._path, number + 1))
            os.replace(self._path, older(self._path, 1))
            return True
        except FileNotFoundError:
            return True
        finally:
            os.close(lock)

    def _is_locked(self, lock: int) -> bool:
        until_s = self._clock.boottime_s() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if self._clock.boottime_s() > until_s:
                    return False
                self._pause.wait(LOCK_S / 50)


def _time(clock: Clock) -> str:
    time = datetime.datetime.fromtimestamp(clock.wall_ns() / 1e9, datetime.UTC).isoformat(
        timespec="milliseconds"
    )
    return time.replace("+00:00", "Z")


def _who(actor: Actor) -> dict[str, Any]:
    if actor.member:
        return {"member": actor.member}
    if actor.uid is None:
        return {"unknown": True}
    found: dict[str, Any] = {"uid": actor.uid, "user": _user(actor.uid), "pid": actor.pid}
    with contextlib.suppress(OSError, ValueError):
        login = int(Path(f"/proc/{actor.pid}/loginuid").read_bytes())
        if login not in (_NO_LOGIN, actor.uid):
            found["login_user"] = _user(login)
    with contextlib.suppress(OSError):
        found["command"] = Path(f"/proc/{actor.pid}/comm").read_text(errors="replace").strip()
    return found


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _send_to_journal(record: dict[str, Any], text: str) -> None:
    """Send the record to systemd's journal by its native protocol (systemd.journal-fields(7)).

    Does nothing outside of a systemd service.
    """
    if "INVOCATION_ID" not in os.environ:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        fields = {
            "MESSAGE": text,
            "PRIORITY": _NOTICE,
            "SYSLOG_IDENTIFIER": "nvpool-audit",
            "NVPOOL_EVENT": record["event"],
            "NVPOOL_RESULT": record["result"],
        }
        sock.sendto("".join(f"{name}={value}\n" for name, value in fields.items()).encode(), _JOURNAL)
