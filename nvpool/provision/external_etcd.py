"""An etcd of the operator's own in place of the pool's: looked at before anything is made, and the pool founded in it.

Called by provision/create and provision/join, with what `--etcd URL[,URL…]`, `--etcd-ca`, `--etcd-cert` and `--etcd-key` say:
all https or all http. nvpool starts, stops and changes no member of it, and writes only below nvpool/POOL_ID/. The certificate
and its key are copied into secret/external-etcd/ of the pool directory, and used from there: who renews them replaces the
files.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nvpool.cluster.etcd.client import Certificates
from nvpool.cluster.etcd.coordinator import EtcdCoordinator
from nvpool.core.errors import BadConfiguration, InvalidRequest, NvpoolError
from nvpool.host.pool_directory import PoolDirectory, write_whole
from nvpool.poolmap.model import PoolMap, encode_map
from nvpool.provision.map_location import EXTERNAL_SECRET, MapLocation, read_map_location, write_map_location
from nvpool.security.tls import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE


class External(NamedTuple):
    members: tuple[str, ...]
    certificates: Certificates | None

    @property
    def kind(self) -> str:
        return "secured" if self.certificates else "plain"


def external(request: dict | None) -> External | None:
    """What the request's "etcd" says: {"urls", "ca", "cert", "key"}. InvalidRequest; BadConfiguration for files that can not be
    read."""
    if not request or not request.get("urls"):
        return None
    urls = [url.strip().rstrip("/") for url in request["urls"].split(",") if url.strip()]
    schemes = {url.partition("://")[0] for url in urls}
    members = tuple(url.partition("://")[2] for url in urls)
    if len(schemes) != 1 or not schemes <= {"http", "https"} or not all(
            host and port.isdigit() for host, _, port in (member.rpartition(":") for member in members)):
        raise InvalidRequest(f"--etcd {request['urls']}: write https://HOST:PORT, or http:// for all, with commas between them")
    files = [request.get(name) for name in ("ca", "cert", "key")]
    if schemes == {"http"}:
        if any(files):
            raise InvalidRequest("--etcd-ca, --etcd-cert and --etcd-key are for an etcd at https://")
        return External(members, None)
    if not all(files):
        raise InvalidRequest("an etcd at https:// takes --etcd-ca, --etcd-cert and --etcd-key: it knows nobody without")
    try:
        return External(members, Certificates(*(Path(file).read_bytes() for file in files)))
    except OSError as error:
        raise BadConfiguration(f"{error.filename} can not be read: {error.strerror}") from None


async def check(given: External) -> None:
    """On return etcd answers, and most of its members are there. Unavailable, AccessDenied."""
    await EtcdCoordinator.answers(given.members, given.certificates)


async def found(directory: PoolDirectory, given: External, first: PoolMap) -> None:
    """On return the pool with the map `first` is in etcd, and the directory says so; also where an interrupted making came so
    far. Unavailable: repeat."""
    keep(directory, given)
    try:
        coordinator = await EtcdCoordinator.found(given.members, first, directory.publish, certificates=given.certificates)
        await coordinator.close()
    except InvalidRequest:
        await EtcdCoordinator.overwrite(given.members, first.pool_id, lambda begun: first, certificates=given.certificates)
        directory.publish(encode_map(first))


async def forget(directory: PoolDirectory, pool_id: str) -> list[str]:
    """The pool is destroyed on this node: remove its keys where no other node has it any more. What was done, and what is left
    to be done by hand where etcd can not be asked, as sentences; none where the pool has no such etcd."""
    location = read_map_location(directory)
    if not location.external:
        return []
    where, below = f"the etcd at {', '.join(location.members)}", f"nvpool/{pool_id}/"
    by_hand = f"`etcdctl del --prefix {below}` removes them"
    try:
        certificates = None
        if location.external == "secured":
            certificates = Certificates(*((directory.secret / EXTERNAL_SECRET / name).read_bytes()
                                          for name in (AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE)))
        left = await EtcdCoordinator.forget(location.members, pool_id, directory.node, certificates=certificates)
    except (OSError, NvpoolError) as error:
        return [f"the pool's keys are still below {below} in {where}, which can not be asked ({error}): {by_hand}"]
    if left:
        return [f"the pool's keys stay below {below} in {where}, for node {', '.join(map(str, left))}: they go when the pool "
                f"is destroyed on the last node that its map has; else {by_hand}"]
    return [f"removed what was below {below} in {where}"]


def keep(directory: PoolDirectory, given: External) -> None:
    """Have the directory say where the map is."""
    if given.certificates:
        secret = directory.secret / EXTERNAL_SECRET
        secret.mkdir(mode=0o700, exist_ok=True)
        for name, content in zip((AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE), given.certificates, strict=True):
            write_whole(secret / name, content, 0o600)
    write_map_location(directory, MapLocation("etcd", given.members, external=given.kind))
