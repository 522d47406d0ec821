"""Node configuration: one TOML file, typed and validated as a whole.

`load` returns a Config in which every value is valid, or raises BadConfiguration with all problems, each with
its line and the reason. `sample` is generated from the same types, so it never becomes outdated. The daemons
call `load` at start, and `nvpool config` uses the whole module. Values that are fixed when a pool is created
(chunk size, replicas) are in the pool map, not here. The module reads one file; it never guesses, and never
replaces an unreadable value by a default.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from nvpool.core.errors import BadConfiguration, InvalidRequest
from nvpool.core.units import GIB, KIB, MIB, TIB, format_bytes, parse_bytes

log = logging.getLogger("nvpool.core.config")

_BYTES = {"unit": "bytes"}

RENAMED_KEYS = {
    ("store", "short_cut"): "short_circuit",
    ("store", "short_cut_group"): "short_circuit_group",
    ("client", "short_cut"): "short_circuit",
}
"""(section, old key) -> present key. Old keys are accepted for one release, with a warning."""


class Log(msgspec.Struct, frozen=True):
    """Logs of the daemons of this node."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="lowest level that is logged"),
    ] = "info"
    to: Annotated[
        Literal["file", "stderr"],
        Meta(description="file: one file per process in log/ of the pool directory"),
    ] = "file"
    format: Annotated[
        Literal["text", "json"],
        Meta(
            description="json: one object per line, with time, level, process, pid, logger, message and error"
        ),
    ] = "text"


class NetworkConfig(msgspec.Struct, frozen=True):
    """Addresses of new processes. Those of processes that exist are in the pool map and do not change."""

    host: Annotated[
        str,
        Meta(
            description="TCP address to listen on, with TLS; 127.0.0.1 is not reachable from other hosts; empty: "
            "unix sockets of this machine only"
        ),
    ] = ""
    base_port: Annotated[
        int, Meta(ge=0, le=65000, description="first TCP port; 0 takes free ones below the ephemeral range")
    ] = 0
    plain_text: Annotated[
        bool,
        Meta(description="no TLS and no certificates; only for a network that no one else uses"),
    ] = False


SOCKET_PATH_MAX = 107
"""Size of sun_path in sockaddr_un, without the terminating zero."""


class AccessConfig(msgspec.Struct, frozen=True):
    """Users of this machine with the rights of an operator, beside root and the user of the daemons."""

    operators: Annotated[
        str,
        Meta(
            description="group (name or number) whose members may read logs, audit log and pool map; the daemons' "
            "user must be root or belong to it; empty: none"
        ),
    ] = ""


class SupervisorConfig(msgspec.Struct, frozen=True):
    """nvpoold, which starts the other processes."""

    drain_s: Annotated[
        float, Meta(ge=0, le=3600, description="how long a stopping process may finish its requests")
    ] = 10.0
    restart_delay_min_s: Annotated[
        float, Meta(gt=0, le=60, description="wait before a dead process is started again")
    ] = 0.05
    restart_delay_max_s: Annotated[
        float, Meta(gt=0, le=3600, description="longest wait: the wait doubles with each death")
    ] = 5.0
    healthy_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="a process that has served this long gets the shortest wait again"),
    ] = 1.0
    replace_after_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="how long a drive, or a node with an etcd member, may be away before its copies or its "
            "member are created elsewhere; 0: they never are",
        ),
    ] = 600.0


class Metrics(msgspec.Struct, frozen=True):
    """Metrics for Prometheus; docs/reference/metrics.md has the names."""

    listen: Annotated[
        str,
        Meta(
            description="address of the metrics page of this node. PORT: loopback only; unix:/PATH: root and "
            "operators; HOST:PORT: every host that reaches HOST, without a password; empty: off"
        ),
    ] = ""


class Processors(msgspec.Struct, frozen=True):
    """How the processes of nvpool use the processors of this machine."""

    awake: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="prevent deep processor sleep while many requests arrive: lower latency, more power "
            "(/dev/cpu_dma_latency); auto: not in guests with more than 16 processors"
        ),
    ] = "auto"
    scheduling: Annotated[
        Literal["normal", "responsive", "priority", "realtime"],
        Meta(
            description="beside other programs that keep the processors busy. priority: nice -10 and short time slices, "
            "so that a process that a request wakes up runs soon; without the right to it as responsive: short slices and "
            "the ordinary share; realtime: SCHED_RR, before all ordinary programs; normal: as the service manager says"
        ),
    ] = "priority"


class JournalConfig(msgspec.Struct, frozen=True):
    """Storage engine of metadata and chunk index."""

    durability: Annotated[
        Literal["interval", "always"],
        Meta(
            description="interval: synced every sync_interval_s and on fsync; always: before each acknowledgement"
        ),
    ] = "interval"
    sync_interval_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=60,
            description="time between journal syncs: a power loss can lose the changes of this time",
        ),
    ] = 0.1
    checkpoint_interval_s: Annotated[
        float, Meta(ge=0.05, le=60, description="time between checkpoints of the memtable to LMDB")
    ] = 1.0
    layer_entries_max: Annotated[
        int,
        Meta(
            ge=100,
            le=10_000_000,
            description="changes in the memtable that start a checkpoint; at twice as many, new ones wait; "
            "fewer if they touch many records",
        ),
    ] = 20_000
    map_bytes_max: Annotated[
        int,
        Meta(
            ge=16 * MIB,
            le=64 * TIB,
            extra=_BYTES,
            description="largest size of the records in an LMDB environment",
        ),
    ] = TIB


class MetadataSection(msgspec.Struct, frozen=True):
    """Metadata shards."""

    session_lease_s: Annotated[
        float, Meta(ge=1, le=3600, description="how long a client may be silent before its session ends")
    ] = 60.0
    grant_s: Annotated[float, Meta(ge=2, le=3600, description="lifetime of an access token (grant)")] = 120.0


class StoreSection(msgspec.Struct, frozen=True):
    """Chunk stores."""

    direct: Annotated[bool, Meta(description="open drives with O_DIRECT: past the kernel's page cache")] = (
        False
    )
    reads: Annotated[
        Literal["auto", "executor"],
        Meta(description="how reads that miss the page cache wait; auto: io_uring if it works here"),
    ] = "auto"
    reserve_share: Annotated[
        float,
        Meta(
            ge=0.005, le=0.5, description="share of the capacity reserved for overwriting, repair and removal"
        ),
    ] = 0.02
    give_back: Annotated[bool, Meta(description="return freed space to the file system (punch holes)")] = True
    resync_bytes_s: Annotated[
        int,
        Meta(
            ge=MIB,
            le=TIB,
            extra=_BYTES,
            description="bytes per second that a target copies from other replicas to catch up; fewer under load",
        ),
    ] = 128 * MIB
    scrub_interval_s: Annotated[
        float,
        Meta(
            ge=0,
            le=366 * 86400,
            description="time between two scrubs, each of which reads and verifies every stored block; 0: only by "
            "nvpool scrub start POOL",
        ),
    ] = 7 * 86400.0
    scrub_bytes_s: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=TIB,
            extra=_BYTES,
            description="bytes per second that a scrub reads; fewer under load",
        ),
    ] = 32 * MIB
    short_circuit: Annotated[
        bool,
        Meta(description="let local mounts and programs read the drives directly; has no effect with direct"),
    ] = True
    short_circuit_group: Annotated[
        str,
        Meta(
            description="group (name or number) that may use short_circuit; empty: only root and the daemons' user"
        ),
    ] = ""


class EncryptionSection(msgspec.Struct, frozen=True):
    """Pool key, which protects the keys of encrypted volumes; the same on each node. Without it, encrypted volumes
    cannot be used."""

    key_file: Annotated[
        str,
        Meta(
            description="one key to a line, the newest first; readable by its owner alone; nvpool encryption key FILE makes one"
        ),
    ] = ""
    key_command: Annotated[
        str,
        Meta(
            description="a command whose output is such a file, as of a key management service or a TPM; "
            "run when a daemon starts"
        ),
    ] = ""


class LimitsSection(msgspec.Struct, frozen=True):
    """Limits for clients of each daemon of this node. A peer is a client certificate, a user of this host, or an
    address without either. Nodes, root, operators and the daemons' user are bound only by the totals."""

    connections: Annotated[
        int,
        Meta(
            ge=64,
            le=1_000_000,
            description="connections of a daemon, at most three quarters of its descriptors; a quarter is "
            "reserved for nodes and root",
        ),
    ] = 16_384
    connections_per_peer: Annotated[
        int,
        Meta(
            ge=4,
            le=1_000_000,
            description="connections of one peer, at most half of those that are not reserved",
        ),
    ] = 2048
    requests_per_peer: Annotated[
        int,
        Meta(
            ge=64,
            le=10_000_000,
            description="requests in flight of one peer; above it, its busiest connections are not read",
        ),
    ] = 8192
    memory_bytes: Annotated[
        int,
        Meta(
            ge=64 * MIB,
            le=TIB,
            extra=_BYTES,
            description="memory of messages in flight and unsent replies of all clients, at most a quarter of "
            "RAM; above it, the peer with the most is disconnected",
        ),
    ] = 4 * GIB
    memory_bytes_per_peer: Annotated[
        int,
        Meta(
            ge=64 * MIB,
            le=TIB,
            extra=_BYTES,
            description="memory of large requests of one peer; above it, no more are read until some have ended",
        ),
    ] = 256 * MIB
    message_s: Annotated[
        float,
        Meta(
            ge=1,
            le=3600,
            description="time to receive a message or to send replies, plus one second per MiB; then the client "
            "is disconnected",
        ),
    ] = 30.0
    sessions: Annotated[
        int,
        Meta(ge=100, le=1_000_000, description="sessions of a shard; a tenth is reserved for nodes and root"),
    ] = 10_000
    sessions_per_peer: Annotated[
        int,
        Meta(
            ge=4, le=1_000_000, description="sessions of one peer at a shard; each mount and program has one"
        ),
    ] = 2000
    locks_per_peer: Annotated[
        int, Meta(ge=1024, le=100_000_000, description="locked ranges at a shard, over all sessions")
    ] = 262_144
    open_files_per_peer: Annotated[
        int, Meta(ge=1024, le=100_000_000, description="open inodes at a shard, over all sessions")
    ] = 2_000_000


class Rdma(msgspec.Struct, frozen=True):
    """RDMA: stores write into their readers' memory, with UCX (pip install 'nvpool[rdma]'). These bytes
    are not encrypted; everything else between hosts is. Check a machine with: nvpool doctor rdma"""

    enabled: Annotated[
        Literal["auto", "off"],
        Meta(description="auto: if a device works and the reader is in `networks` or `local`"),
    ] = "auto"
    networks: Annotated[
        str,
        Meta(
            description="networks (10.1.0.0/16, comma-separated) that no one else uses; their readers get RDMA"
        ),
    ] = ""
    local: Annotated[
        bool,
        Meta(
            description="use shared memory instead of unix sockets for readers of this host that run as the daemons' user"
        ),
    ] = False
    transports: Annotated[
        str,
        Meta(
            pattern="^[a-z0-9_]+(,[a-z0-9_]+){0,15}$",
            description="transports of UCX; auto: InfiniBand and RoCE, and shared memory on one host",
        ),
    ] = "auto"
    devices: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_.:-]+(,[A-Za-z0-9_.:-]+){0,15}$",
            description="devices of this host, like mlx5_0:1, comma-separated",
        ),
    ] = "all"
    poll_us: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="microseconds to poll for a completed write before sleeping; lowers latency, costs processor time",
        ),
    ] = 0


WORKERS_MAX = 64
"""Upper bound: each worker has two descriptors that are passed in one message, and a message carries 253."""


class ClientSection(msgspec.Struct, frozen=True):
    """Mounts and programs on this node that are given this pool directory."""

    deadline_s: Annotated[
        float, Meta(ge=1, le=86400, description="how long a call waits for a daemon that is gone")
    ] = 60.0
    engine: Annotated[
        Literal["auto", "kernel", "pyfuse3"],
        Meta(
            description="engine of mounts. kernel: /dev/fuse directly; pyfuse3: libfuse; auto: kernel on Linux "
            "5.4 and newer"
        ),
    ] = "auto"
    transport: Annotated[
        str,
        Meta(
            pattern="^(auto|[a-z][a-z0-9+.-]*)$",
            description="only transport to use: stream+unix, stream, grpc or an installed one; auto: the best "
            "that both ends have",
        ),
    ] = "auto"
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=WORKERS_MAX,
            description="processes of a mount with a holder; all but one only read files above 64 KiB",
        ),
    ] = 1
    attr_timeout_s: Annotated[
        float, Meta(ge=0, le=3600, description="how long the kernel may keep attributes")
    ] = 1.0
    entry_timeout_s: Annotated[
        float, Meta(ge=0, le=3600, description="how long the kernel may keep names")
    ] = 1.0
    short_circuit: Annotated[
        bool,
        Meta(description="read local drives directly if the store permits it"),
    ] = True
    late_closes: Annotated[
        bool,
        Meta(
            description="mounts complete the close of a new file before its data is at the stores; other clients "
            "see all of it nevertheless, but a power loss of this host may lose what was not synced"
        ),
    ] = True
    locations_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=64 * GIB,
            extra=_BYTES,
            description="memory for block locations, about a thousandth of the data read",
        ),
    ] = 64 * MIB
    write_buffer_bytes: Annotated[
        int,
        Meta(ge=MIB, le=64 * GIB, extra=_BYTES, description="unsent writes kept in memory, over all files"),
    ] = 64 * MIB
    read_ahead_bytes: Annotated[
        int, Meta(ge=0, le=GIB, extra=_BYTES, description="read-ahead of one sequential handle")
    ] = 8 * MIB
    read_ahead_bytes_max: Annotated[
        int, Meta(ge=0, le=64 * GIB, extra=_BYTES, description="read-ahead of all handles together")
    ] = 128 * MIB
    rack: Annotated[
        str,
        Meta(
            max_length=64,
            description="rack of this host if it is not a node; replicas in that rack are read first",
        ),
    ] = ""


class Config(msgspec.Struct, frozen=True):
    log: Log = Log()
    network: NetworkConfig = NetworkConfig()
    access: AccessConfig = AccessConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    metrics: Metrics = Metrics()
    processors: Processors = Processors()
    journal: JournalConfig = JournalConfig()
    meta: MetadataSection = MetadataSection()
    store: StoreSection = StoreSection()
    client: ClientSection = ClientSection()
    limits: LimitsSection = LimitsSection()
    encryption: EncryptionSection = EncryptionSection()
    rdma: Rdma = Rdma()


def networks_of(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    """Return the networks listed in `rdma.networks`; ValueError if an entry is not a network."""
    return tuple(ip_network(part.strip()) for part in text.split(",") if part.strip())


SOCKET_PREFIX = "unix:"


def parse_address(text: str) -> tuple[str, int]:
    """Return (host, port) of an address to listen on, or (path, 0) of unix:/PATH.

    `text` is HOST:PORT, [ADDRESS]:PORT, or PORT or :PORT for the loopback address.
    InvalidRequest: `text` is none of these, or the path of the socket is relative or too long.
    """
    if text.startswith(SOCKET_PREFIX):
        path = text.removeprefix(SOCKET_PREFIX)
        if not path.startswith("/") or len(os.fsencode(path)) > SOCKET_PATH_MAX or "\0" in path:
            raise InvalidRequest(
                f"{text!r} is not a socket to listen on; write unix:/PATH, with at most {SOCKET_PATH_MAX} bytes "
                f"of path"
            )
        return path, 0
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise InvalidRequest(
            f"{text!r} is not an address to listen on; write PORT for this machine alone, like 9477, HOST:PORT, "
            f"or unix:/PATH"
        )
    return host.strip("[]") or "127.0.0.1", int(port)


def is_open(address: str) -> bool:
    """Return whether other machines may reach `address`; InvalidRequest as in `parse_address`."""
    host, port = parse_address(address)
    if not port or host == "localhost":
        return False
    try:
        return not ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return True


def _contradictions(config: Config) -> list[tuple[str, str, str]]:
    """Return (section, key, reason) of values that are valid alone but not together."""
    found = []
    if config.supervisor.restart_delay_min_s > config.supervisor.restart_delay_max_s:
        found.append(("supervisor", "restart_delay_min_s", "is longer than restart_delay_max_s"))
    if 0 < config.supervisor.replace_after_s < 5:
        found.append(("supervisor", "replace_after_s", "is shorter than a restart may take; 5 is the least"))
    if config.journal.sync_interval_s > config.journal.checkpoint_interval_s:
        found.append(
            ("journal", "sync_interval_s", "is longer than checkpoint_interval_s, which syncs anyway")
        )
    if config.meta.grant_s < config.meta.session_lease_s:
        found.append(
            (
                "meta",
                "grant_s",
                "is shorter than session_lease_s: clients would lose rights before their session",
            )
        )
    if {"tcp", "all"} & set(config.rdma.transports.split(",")):
        found.append(
            (
                "rdma",
                "transports",
                "has UCX's tcp, which emulates one-sided writes and ends a reader's process when a "
                "store dies; without a device for RDMA the pool's own transports are faster",
            )
        )
    try:
        networks_of(config.rdma.networks)
    except ValueError as error:
        found.append(("rdma", "networks", f"is not a list of networks: {error}"))
    if config.metrics.listen:
        try:
            parse_address(config.metrics.listen)
        except InvalidRequest as error:
            found.append(("metrics", "listen", str(error)))
    if config.encryption.key_file and config.encryption.key_command:
        found.append(
            ("encryption", "key_command", "is there beside key_file: the pool key comes from one place")
        )
    if config.limits.memory_bytes_per_peer > config.limits.memory_bytes:
        found.append(("limits", "memory_bytes_per_peer", "is more than memory_bytes"))
    if config.client.read_ahead_bytes > config.client.read_ahead_bytes_max:
        found.append(("client", "read_ahead_bytes", "is more than read_ahead_bytes_max"))
    return found


def parse(text: str, where: str = "the configuration") -> Config:
    """Return the configuration in `text`; a repeated call with the same text returns the cached result.

    Old names of keys are accepted silently. BadConfiguration: names `where` and lists every problem with its
    line and reason.
    """
    return _parsed(text, where)[0]


@lru_cache(maxsize=1)
def _parsed(text: str, where: str) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration in `text`, and a warning for each key that has an old name."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadConfiguration(f"{where} is not TOML: {error}") from None
    lines = _lines_of(text)
    problems: list[tuple[int, str]] = []
    warnings: list[str] = []
    sections: dict[str, Any] = {}
    for name, kind in _sections():
        table = raw.pop(name, {})
        if not isinstance(table, dict):
            problems.append(
                (
                    lines.get((name, ""), lines.get(("", name), 0)),
                    f"{name} is a section: write it as [{name}]",
                )
            )
            continue
        values = {}
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        for key, value in table.items():
            line = lines.get((name, key), lines.get((name, ""), 0))
            present = RENAMED_KEYS.get((name, key), key)
            if present not in fields:
                problems.append((line, f"{name}.{key} is unknown{_nearest(key, fields)}"))
                continue
            if present != key:
                if present in table:
                    problems.append(
                        (
                            line,
                            f"{name}.{key} is the old name of {name}.{present}, which is there too; remove {key}",
                        )
                    )
                    continue
                lines[name, present] = line
                warnings.append(
                    f"{where}, line {line}: {name}.{key} is now named {name}.{present}; rename the key: "
                    f"the next release refuses the old name"
                )
            try:
                values[present] = _convert(value, fields[present].type)
            except (msgspec.ValidationError, ValueError) as error:
                wanted = _expected(fields[present].type) if isinstance(error, msgspec.ValidationError) else ""
                problems.append((line, f"{name}.{key} = {_toml(value)}: {wanted or _plain(error)}"))
        sections[name] = kind(**values)
    for key in raw:
        line = lines.get((key, ""), lines.get(("", key), 0))
        problems.append((line, f"{key} is unknown{_nearest(key, dict(_sections()))}"))
    config = Config(**sections)
    for section, key, reason in _contradictions(config):
        problems.append((lines.get((section, key), lines.get((section, ""), 0)), f"{section}.{key} {reason}"))
    if problems:
        details = "\n".join(
            f"  line {line}: {reason}" if line else f"  {reason}" for line, reason in sorted(problems)
        )
        raise BadConfiguration(f"{where} is wrong:\n{details}")
    return config, tuple(warnings)


def load(path: str | os.PathLike[str]) -> Config:
    """Return the configuration in the file at `path`; BadConfiguration if the file is unreadable or wrong.

    Logs a warning for each key with an old name; without a log, as in the commands, the warning is on stderr.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MIB)
    except FileNotFoundError:
        raise BadConfiguration(
            f"the file {path} does not exist; write one with: nvpool config sample > {path}"
        ) from None
    except UnicodeDecodeError as error:
        raise BadConfiguration(f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise BadConfiguration(f"{path} cannot be read: {error.strerror}") from None
    config, warnings = _parsed(text, str(path))
    for warning in warnings:
        log.warning("%s", warning)
    return config


def sample(config: Config | None = None) -> str:
    """Return a configuration file with every key, its meaning, its range, and its default (commented out).

    Values of `config` that differ from the default are set. `parse` accepts the file.
    """
    out = [
        "# nvpool: configuration of one node. Keys that are commented out have the value shown.",
        "# Sizes may be written like 64MiB; times are in seconds. Check with: nvpool config check FILE",
        "",
    ]
    for name, kind in _sections():
        out += [f"# {line.strip()}" for line in (kind.__doc__ or "").splitlines()] + [f"[{name}]"]
        given = getattr(config, name) if config is not None else kind()
        for field in msgspec.structs.fields(kind):
            value = getattr(given, field.name)
            out.append(f"# {_described(field.type)}")
            out.append(
                f"{'# ' if value == field.default else ''}{field.name} = {_written(value, field.type)}"
            )
        out.append("")
    return "\n".join(out)


def as_dict(config: Config) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    return sections


def _sections() -> list[tuple[str, type[msgspec.Struct]]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(Config)]


def _parts(annotation: Any) -> tuple[Any, Meta]:
    """Split the annotation of an Annotated field into (type, Meta)."""
    assert get_origin(annotation) is Annotated
    base, meta = get_args(annotation)
    return base, meta


def _convert(value: Any, annotation: Any) -> Any:
    base, meta = _parts(annotation)
    if meta.extra == _BYTES and isinstance(value, str):
        value = parse_bytes(value)
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if base is float and isinstance(value, float) and value != value:
        raise ValueError("is not a number")
    if get_origin(base) is Literal and value not in get_args(base):
        raise ValueError(f"write one of {', '.join(get_args(base))}")
    return msgspec.convert(value, annotation)


def _toml(value: Any) -> str:
    """Return `value` as a TOML file shows it."""
    try:
        return str(value) if isinstance(value, float) else msgspec.json.encode(value).decode()
    except (TypeError, ValueError, msgspec.MsgspecError):
        return str(value)


def _expected(annotation: Any) -> str:
    """Describe a correct value in the terms of TOML; return "" if the validation error is clear enough."""
    base, meta = _parts(annotation)
    if base is bool:
        return "write true or false"
    if base is str and meta.pattern is None:
        return "write text in quotes" if not meta.min_length else "write text in quotes, not empty"
    if base not in (int, float):
        return ""
    low = meta.ge if meta.ge is not None else meta.gt
    high = meta.le if meta.le is not None else meta.lt
    if meta.extra == _BYTES:
        what, shown = (
            'a size like "64MiB"',
            [_size(int(n)).strip('"') if n is not None else "" for n in (low, high)],
        )
    else:
        what = "a whole number" if base is int else "a number"
        shown = [f"{n:,}" if n is not None and n >= 10_000 else f"{n}" for n in (low, high)]
    words = [f"{'above' if meta.gt is not None else 'from'} {shown[0]}"] if low is not None else []
    words += [f"{'below' if meta.lt is not None else 'to'} {shown[1]}"] if high is not None else []
    return " ".join([f"write {what}", *words])


def _plain(error: Exception) -> str:
    text = str(error).split(" - at ")[0]
    return text.replace("`", "").replace("int >=", "a whole number >=").replace("int <=", "a whole number <=")


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), 1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


def _described(annotation: Any) -> str:
    base, meta = _parts(annotation)
    size = meta.extra == _BYTES
    low = meta.ge if meta.ge is not None else meta.gt
    text = meta.description or ""
    if get_origin(base) is Literal:
        return f"{text} (one of {', '.join(get_args(base))})"
    if low is not None and meta.le is not None:
        shown = [
            _size(int(n)).strip('"') if size else f"{n:,}" if n >= 10_000 else f"{n}" for n in (low, meta.le)
        ]
        return f"{text} ({'above ' if meta.gt is not None else ''}{shown[0]} to {shown[1]})"
    return text


def _size(count: int) -> str:
    for unit in (TIB, GIB, MIB, KIB):
        if count and count % unit == 0:
            return f'"{format_bytes(count).split(" ")[0].split(".")[0]}{format_bytes(unit).split(" ")[1]}"'
    return str(count)


def _written(value: Any, annotation: Any) -> str:
    _, meta = _parts(annotation)
    if meta.extra == _BYTES:
        return _size(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    return repr(value)


_HEADER = re.compile(r"\s*\[\[?\s*([A-Za-z0-9_\-]+)")
_KEY = re.compile(r"""\s*(?:([A-Za-z0-9_\-]+)\s*\.\s*)?["']?([A-Za-z0-9_\-]+)["']?\s*=""")


def _lines_of(text: str) -> dict[tuple[str, str], int]:
    """Return the line (from 1) of each (section, key), and of each section's header as (section, '').

    Needed because tomllib reports no line numbers for parsed values.
    """
    found: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = header[1]
            found.setdefault((section, ""), number)
        elif key := _KEY.match(line):
            found.setdefault((key[1] or section, key[2]), number)
    return found
