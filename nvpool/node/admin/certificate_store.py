"""Certificates of a node: the files in secret/, their expiry, the last renewal error, and signed
certificates.

Used by node/status, node/supervisor and node/admin/join_server. The CA keeps no list that decides anything:
the pool map decides which members belong to the pool. secret/issued.json records the last certificate of each
member that this node has signed, for `nvpool cert ls`; its loss does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import msgspec

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import NvpoolError
from nvpool.host.pool_directory import PoolDirectory, write_whole
from nvpool.security.ca import CertificateFacts, described
from nvpool.security.tls import AUTHORITY_FILE, CERTIFICATE_FILE, ETCD_SECRET

ISSUED_FILE = "issued.json"
ISSUED_MAX = 10_000
KEPT_S = 30 * 86_400
"""How long an expired certificate is remembered."""
KINDS = {
    "authority": AUTHORITY_FILE,
    "member": CERTIFICATE_FILE,
    "etcd-authority": f"{ETCD_SECRET}/{AUTHORITY_FILE}",
    "etcd-member": f"{ETCD_SECRET}/{CERTIFICATE_FILE}",
    "external-etcd-authority": f"external-etcd/{AUTHORITY_FILE}",
    "external-etcd-member": f"external-etcd/{CERTIFICATE_FILE}",
}
"""Purpose of a certificate -> its file in secret/."""

log = logging.getLogger("nvpool.node.admin.certificate_store")


class Issued(msgspec.Struct, frozen=True):
    serial: str
    begins_s: float
    ends_s: float


class CertificateStore:
    """Certificates of one node. `trouble` is the reason why the last renewal failed; empty: it succeeded."""

    def __init__(self, directory: PoolDirectory, clock: Clock = SYSTEM_CLOCK) -> None:
        self._secret = directory.secret
        self._clock = clock
        self._seen: dict[str, tuple[int, CertificateFacts]] = {}
        self._noting = threading.Lock()
        self.trouble = ""
        self.renewing = asyncio.Lock()
        """Held while this node's certificate is being renewed."""

    def own(self) -> dict[str, CertificateFacts]:
        """Kind -> certificate in secret/, for those that exist and can be read."""
        found = {}
        for kind, file in KINDS.items():
            path = self._secret / file
            try:
                changed_ns = path.stat().st_mtime_ns
                if self._seen.get(kind, (0,))[0] != changed_ns:
                    self._seen[kind] = changed_ns, described(path.read_bytes())
            except (OSError, NvpoolError):
                continue  # an unusable certificate is reported where it is used
            found[kind] = self._seen[kind][1]
        return found

    def status(self) -> list[dict[str, Any]]:
        """This node's certificates, in the form of `nvpool status --json`."""
        return [{"kind": kind} | _certificate_status(one) for kind, one in self.own().items()]

    # -- certificates that this node has signed --------------------------------------------------------------

    def note_issued(self, member: str, certificate: bytes) -> None:
        """Record the newest certificate of `member`. A failed write is only logged. Any thread may call this."""
        with self._noting:
            self._note_issued(member, described(certificate))

    def _note_issued(self, member: str, found: CertificateFacts) -> None:
        now_s = self._clock.wall_ns() / 1e9
        issued = {name: one for name, one in self.issued().items() if one.ends_s > now_s - KEPT_S}
        issued[member] = Issued(found.serial, found.begins_s, found.ends_s)
        for name in sorted(issued, key=lambda name: issued[name].ends_s)[: max(0, len(issued) - ISSUED_MAX)]:
            del issued[name]
        try:
            write_whole(self._secret / ISSUED_FILE, msgspec.json.encode(issued), 0o600)
        except OSError as error:
            log.warning("it is not noted that a certificate of %s was signed: %s", member, error)

    def issued(self) -> dict[str, Issued]:
        """Member -> the last certificate that this node has signed for it."""
        try:
            return msgspec.json.decode(Path(self._secret / ISSUED_FILE).read_bytes(), type=dict[str, Issued])
        except (OSError, msgspec.MsgspecError):
            return {}

    def issued_status(self) -> list[dict[str, Any]]:
        return [
            {"member": member, "serial": one.serial, "begins_s": one.begins_s, "ends_s": one.ends_s}
            for member, one in sorted(self.issued().items())
        ]


def _certificate_status(one: CertificateFacts) -> dict[str, Any]:
    return {"member": one.member, "serial": one.serial, "begins_s": one.begins_s, "ends_s": one.ends_s}
