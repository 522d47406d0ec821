"""External etcd: checks an operator's own etcd, and creates the pool in it.

Used by provision/create and provision/join with the values of `--etcd URL[,URL…]`, `--etcd-ca`, `--etcd-cert`
and `--etcd-key`: all URLs are https or all are http. nvpool starts, stops and changes no member of such an
etcd, and writes only below nvpool/POOL_ID/. The certificate and its key are copied to secret/external-etcd/
of the pool directory and used from there. To renew them, the operator replaces these files.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nvpool.cluster.etcd.client import EtcdCertificates
from nvpool.cluster.etcd.coordinator import EtcdCoordinator
from nvpool.core.errors import BadConfiguration, InvalidRequest, NvpoolError
from nvpool.host.pool_directory import PoolDirectory, write_whole
from nvpool.poolmap.model import PoolMap, encode_map
from nvpool.provision.map_location import EXTERNAL_SECRET, MapLocation, read_map_location, write_map_location
from nvpool.security.tls import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE


class External(NamedTuple):
    members: tuple[str, ...]
    certificates: EtcdCertificates | None

    @property
    def kind(self) -> str:
        return "secured" if self.certificates else "plain"


def external(request: dict | None) -> External | None:
    """Parse the request's "etcd": {"urls", "ca", "cert", "key"}; None if it names no etcd.

    InvalidRequest; BadConfiguration: a file cannot be read.
    """
    if not request or not request.get("urls"):
        return None
    urls = [url.strip().rstrip("/") for url in request["urls"].split(",") if url.strip()]
    schemes = {url.partition("://")[0] for url in urls}
    members = tuple(url.partition("://")[2] for url in urls)
    if (
        len(schemes) != 1
        or not schemes <= {"http", "https"}
        or not all(
            host and port.isdigit() for host, _, port in (member.rpartition(":") for member in members)
        )
    ):
        raise InvalidRequest(
            f"--etcd {request['urls']}: write https://HOST:PORT, or http:// for all, with commas between them"
        )
    files = [request.get(name) for name in ("ca", "cert", "key")]
    if schemes == {"http"}:
        if any(files):
            raise InvalidRequest("--etcd-ca, --etcd-cert and --etcd-key are for an etcd at https://")
        return External(members, None)
    if not all(files):
        raise InvalidRequest(
            "an etcd at https:// takes --etcd-ca, --etcd-cert and --etcd-key: it knows nobody without"
        )
    try:
        return External(members, EtcdCertificates(*(Path(file).read_bytes() for file in files)))
    except OSError as error:
        raise BadConfiguration(f"{error.filename} cannot be read: {error.strerror}") from None


async def check(given: External) -> None:
    """Check that etcd answers with a quorum. Unavailable, AccessDenied."""
    await EtcdCoordinator.answers(given.members, given.certificates)


async def found(directory: PoolDirectory, given: External, first: PoolMap) -> None:
    """Store the pool's first map in etcd and record the location in the directory.

    This works also if an interrupted creation has stored a map already. Unavailable: repeat.
    """
    keep(directory, given)
    try:
        coordinator = await EtcdCoordinator.found(
            given.members, first, directory.publish, certificates=given.certificates
        )
        await coordinator.close()
    except InvalidRequest:
        await EtcdCoordinator.overwrite(
            given.members, first.pool_id, lambda begun: first, certificates=given.certificates
        )
        directory.publish(encode_map(first))


async def forget(directory: PoolDirectory, pool_id: str) -> list[str]:
    """Remove a destroyed pool's keys from etcd if this was its last node.

    Returns sentences: what was done or, if etcd is unreachable, what the operator must do. Empty for a pool
    without such an etcd.
    """
    location = read_map_location(directory)
    if not location.external:
        return []
    where, below = f"the etcd at {', '.join(location.members)}", f"nvpool/{pool_id}/"
    by_hand = f"`etcdctl del --prefix {below}` removes them"
    try:
        certificates = None
        if location.external == "secured":
            certificates = EtcdCertificates(
                *(
                    (directory.secret / EXTERNAL_SECRET / name).read_bytes()
                    for name in (AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE)
                )
            )
        left = await EtcdCoordinator.forget(
            location.members, pool_id, directory.node, certificates=certificates
        )
    except (OSError, NvpoolError) as error:
        return [
            f"the pool's keys are still below {below} in {where}, which cannot be asked ({error}): {by_hand}"
        ]
    if left:
        return [
            f"the pool's keys stay below {below} in {where}, for node {', '.join(map(str, left))}: they go when the pool "
            f"is destroyed on the last node that its map has; else {by_hand}"
        ]
    return [f"removed what was below {below} in {where}"]


def keep(directory: PoolDirectory, given: External) -> None:
    """Record in the directory where the map is."""
    if given.certificates:
        secret = directory.secret / EXTERNAL_SECRET
        secret.mkdir(mode=0o700, exist_ok=True)
        for name, content in zip(
            (AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE), given.certificates, strict=True
        ):
            write_whole(secret / name, content, 0o600)
    write_map_location(directory, MapLocation("etcd", given.members, external=given.kind))
