"""Audit events of a daemon: changes by operators and clients, and refusals.

Used by node/supervisor and node/admin/join_server for changes of the pool, and by runtime/daemon_lifecycle for
requests to a metadata service. Data access, attaching a volume and ordinary changes of files are no events.
Nothing here decides or delays a reply.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from nvpool.core.config import Config, as_dict
from nvpool.core.errors import AccessDenied, NotPermitted, Refused
from nvpool.host.pool_directory import PoolDirectory
from nvpool.rpc.api import Buffer, Call
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.runtime.audit_log import Actor, AuditLog
from nvpool.security.audit_format import FILE

_VOLUME_ACTIONS = {"SET", "SEAL", "GRANT", "REVOKE", "REMOVE", "DETACH", "KEY", "REWRAP"}
_NEW_VOLUME = bytes((pb.CreateRequest.DESCRIPTOR.fields_by_name["volume"].number << 3 | 2,))
"""First byte of a new volume's field in a message (protobuf: number and wire type); few others contain it."""

Event = tuple[str, dict[str, Any]]
T = TypeVar("T")


def audit_log(directory: PoolDirectory, process: str) -> AuditLog:
    return AuditLog(directory.log / FILE, directory.run / "audit.lock", process)


def actor_of(peer: Peer) -> Actor:
    credentials = peer.credentials
    if credentials is None or peer.member:
        return Actor(peer.member, address=peer.address)
    return Actor(uid=credentials.uid, pid=credentials.pid, address=peer.address)


def ourselves() -> Actor:
    """Actor for what a daemon does itself or for the user that started it."""
    return Actor(uid=os.geteuid(), pid=os.getpid())


def is_refusal(error: BaseException | None) -> bool:
    """Whether the caller lacks the right. Other errors mean that the request could not be carried out."""
    return isinstance(error, AccessDenied | NotPermitted)


def settings_of(config: Config) -> dict[str, Any]:
    """Settings that differ from their defaults, by section."""
    defaults = as_dict(Config())
    changed = {
        section: {name: value for name, value in keys.items() if value != defaults[section][name]}
        for section, keys in as_dict(config).items()
    }
    return {section: keys for section, keys in changed.items() if keys}


async def audited(log: AuditLog, event: str, actor: Actor, what: dict[str, Any], work: Awaitable[T]) -> T:
    """Await `work`, record its success or its error, and return its result."""
    try:
        result = await work
    except Exception as error:
        log.note(event, actor, what, error, refused=is_refusal(error))
        raise
    log.note(event, actor, what)
    return result


class MetaAudit:
    """Audit of a metadata service's requests.

    For a request that is no event `watched` costs one table lookup.
    """

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._events: dict[int, Callable[[Buffer], Event | None]] = {
            wire.META_CREATE: _created,
            wire.META_VOLUME: _volume_action,
            wire.META_TRASH: _trash_action,
            wire.META_DUMP: lambda message: ("dump", {}),
            wire.META_LOAD: lambda message: ("load", {}),
            wire.META_FSCK: _repair_begun,
            wire.META_FSCK_CLIMB: _directory_moved,
        }

    def watched(self, call: Call) -> Call:
        """Return `call`, or a wrapper that records its result."""
        read = self._events.get(call.method)
        if read is None or (call.method == wire.META_CREATE and bytes(call.message).find(_NEW_VOLUME) < 0):
            return call
        try:
            event = read(call.message)
        except DecodeError:
            return call  # the service refuses the message
        return call if event is None else _Watched(call, *event, self._log)


class _Watched:
    """A Call whose result is recorded."""

    def __init__(self, call: Call, event: str, what: dict[str, Any], log: AuditLog) -> None:
        self._call = call
        self._event = event
        self._what = what
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def reply(self, message: Buffer = b"", payload=()) -> None:
        self._call.reply(message, payload)
        if self._event.startswith("volume-") and self._call.method == wire.META_VOLUME:
            try:
                if name := pb.VolumeReply.FromString(bytes(message)).volume.name:
                    self._what["volume"] = name
            except DecodeError:
                pass
        self._log.note(self._event, actor_of(self._call.peer), self._what)

    def fail(self, error: BaseException) -> None:
        self._call.fail(error)
        if isinstance(error, Refused):  # else the client retries, perhaps at another shard
            self._log.note(
                self._event, actor_of(self._call.peer), self._what, error, refused=is_refusal(error)
            )


def _created(message: Buffer) -> Event | None:
    request = pb.CreateRequest.FromString(bytes(message))
    if not request.HasField("volume"):
        return None
    return "volume-create", {"volume": request.name.decode(errors="replace")} | _fields(request.volume)


def _volume_action(message: Buffer) -> Event | None:
    request = pb.VolumeRequest.FromString(bytes(message))
    if request.action not in pb.VolumeRequest.Action.values():
        return None
    action = pb.VolumeRequest.Action.Name(request.action)
    if action not in _VOLUME_ACTIONS:
        return None
    what: dict[str, Any] = {"inode": request.inode}
    if action in ("GRANT", "REVOKE"):
        what["client"] = request.grant.client
    if action == "DETACH":
        what["holder"] = request.holder
    if action == "GRANT":
        what["right"] = "rw" if request.grant.write else "ro"
    if action == "SET":
        what |= {
            name: value
            for name, value in _fields(request).items()
            if name not in ("session", "inode", "action")
        }
    return f"volume-{action.lower()}", what


def _repair_begun(message: Buffer) -> Event | None:
    """The first step of a check of a shard that repairs; the others, thousands of them, are no events."""
    request = pb.FsckRequest.FromString(bytes(message))
    return ("fsck-repair", {}) if request.repair and not request.cursor else None


def _directory_moved(message: Buffer) -> Event | None:
    request = pb.FsckClimbRequest.FromString(bytes(message))
    if not request.loose:
        return None
    return "fsck-move", {"inode": request.loose, "parent": request.parent}


def _trash_action(message: Buffer) -> Event | None:
    request = pb.TrashRequest.FromString(bytes(message))
    if request.action == pb.TrashRequest.LIST:
        return None
    return f"trash-{'restore' if request.action == pb.TrashRequest.RESTORE else 'purge'}", {
        "inode": request.inode,
        "entry": request.entry,
    }


def _fields(message: Message) -> dict[str, Any]:
    """Fields that are set and are numbers or strings."""
    return {field.name: value for field, value in message.ListFields() if isinstance(value, int | str)}
