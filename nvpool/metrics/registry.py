"""Registry of all metrics: name, kind, labels and meaning; and the histogram that hot paths update.

Names are nvpool_WHAT_UNIT, by the conventions of Prometheus (prometheus.io/docs/practices/naming): base
units, `_total` for values that only grow. Labels have few values: operations, transports, states, numbers of
targets and shards; never a path, a file name, an inode or a client. Values are plain numbers in the objects
that own them; at a scrape, the owner copies them to a `metrics/exposition` page. tests/house reads this file:
each name must follow the conventions, be reported by some process, and appear in docs/reference/metrics.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Labels of the metric; the page of a node adds the label `process`."""


METRICS: dict[str, Metric] = {}


def _declared(kind: Kind, name: str, text: str, labels: str) -> Metric:
    metric = METRICS[f"nvpool_{name}"] = Metric(f"nvpool_{name}", kind, text, tuple(labels.split()))
    return metric


def _counter(name: str, text: str, labels: str = "") -> Metric:
    return _declared("counter", name, text, labels)


def _gauge(name: str, text: str, labels: str = "") -> Metric:
    return _declared("gauge", name, text, labels)


def _histogram(name: str, text: str, labels: str = "") -> Metric:
    return _declared("histogram", name, text, labels)


# -- every process -----------------------------------------------------------------------------------------------------------

UP = _gauge("up", "1 while the process answers, 0 when it runs and does not, or does not run.")
BUILD_INFO = _gauge("build_info", "Always 1; the version is the label.", "version")
PROCESS_CPU = _counter("process_cpu_seconds_total", "Processor time of the process, in user and system mode.")
PROCESS_MEMORY = _gauge("process_resident_memory_bytes", "Memory of the process that is in RAM.")
PROCESS_DESCRIPTORS = _gauge("process_open_fds", "File descriptors that the process has open.")
PROCESS_DESCRIPTORS_MAX = _gauge("process_max_fds", "File descriptors that it may have open.")
PROCESS_START = _gauge("process_start_time_seconds", "When the process began, since 1970.")

REQUEST_SECONDS = _histogram(
    "request_seconds",
    "Requests answered, from their arrival to their answer; a request may be a "
    "batch of many reads or writes, and pool_map and meta_watch wait on purpose.",
    "op transport",
)
REQUEST_ERRORS = _counter("request_errors_total", "Requests answered with an error.", "op error")
REQUEST_BYTES = _counter(
    "request_bytes_total", "Payload of requests (in) and of their answers (out).", "op transport direction"
)
REQUESTS_GIVEN_UP = _counter(
    "requests_given_up_total", "Requests whose caller has gone or cancelled before the answer.", "transport"
)
REQUESTS_IN_WORK = _gauge(
    "requests_in_work", "Requests that have arrived and are not answered yet.", "transport"
)
CALL_SECONDS = _histogram(
    "call_seconds", "Questions to other processes, from the sending to the answer.", "op"
)
CALL_ERRORS = _counter(
    "call_errors_total",
    "Questions that ended with an error: that of the answer, a lost connection, or no answer in time.",
    "op error",
)
CALLS_IN_FLIGHT = _gauge(
    "calls_in_flight", "Questions to other processes that wait for their answer or their turn."
)

LIMITS_MET = _counter(
    "limits_met_total",
    "Times that a client was refused, held back or cut off, by the key of [limits] in node.toml.",
    "limit",
)

KV_ENTRIES = _gauge("kv_entries", "Records in the LMDB environment of a shard or of a target's index.")
KV_USED = _gauge("kv_used_bytes", "Of the LMDB environment, in use.")
KV_MAP_MAX = _gauge("kv_map_max_bytes", "What the LMDB environment may grow to.")
KV_JOURNAL = _gauge("kv_journal_bytes", "Journal since the last checkpoint.")
KV_WAITING = _gauge("kv_layer_entries", "Changes in memory that no checkpoint has written yet.")
KV_CHECKPOINTS = _counter("kv_checkpoints_total", "Checkpoints: memory written to LMDB.")
KV_SYNCS = _counter("kv_syncs_total", "Syncs of the journal.")
KV_CHANGES = _counter("kv_changes_total", "Changes applied, since the records were made.")
KV_UNSYNCED = _gauge("kv_unsynced_changes", "Changes that a loss of power would take.")
KV_DRIVE_FULL = _gauge("kv_drive_full", "1 while the journal or LMDB finds no room on its drive.")

# -- a store -----------------------------------------------------------------------------------------------------------------

STORE_READS = _counter("store_reads_total", "Reads answered by the store, each of a batch.")
STORE_READ_BYTES = _counter("store_read_bytes_total", "Bytes read by the store for them.")
STORE_READS_WAITED = _counter(
    "store_reads_waited_total", "Pieces of reads that were not in memory and waited for the drive."
)
STORE_WRITES = _counter("store_writes_total", "Writes made by the store, each of a batch.")
STORE_FLUSHES = _counter("store_flushes_total", "Flushes of the drive that were asked for.")
STORE_SHORT_CIRCUIT_READS = _counter(
    "store_short_cut_reads_total",
    "Reads that clients of this host made past the store, as they reported when they asked for locations.",
)
STORE_SHORT_CIRCUIT_BYTES = _counter("store_short_cut_bytes_total", "Bytes of these reads.")
STORE_WAITING = _gauge(
    "store_waiting_requests", "Requests that wait in the store for the drive, another target, or their turn."
)
STORE_CAPACITY = _gauge("store_capacity_bytes", "What chunks may take, without the reserve.")
STORE_USED = _gauge("store_used_bytes", "What chunks take.")
STORE_BAD_BLOCKS = _gauge(
    "store_bad_blocks", "Blocks that do not fit their checksum and are not repaired yet."
)
STORE_REPAIRED = _counter(
    "store_repaired_blocks_total", "Bad blocks that were rewritten from another replica."
)
STORE_REBUILT = _counter(
    "store_rebuilt_chunks_total", "Chunks that were copied whole from another replica after damage."
)
STORE_ORPHAN_CHUNKS_REMOVED = _counter(
    "store_strays_removed_chunks_total", "Chunks given up because their chains are others' now."
)
STORE_ORPHAN_CHUNKS_LEFT = _gauge(
    "store_strays_left_chunks",
    "Chunks of chains that are others' now and could not be "
    "removed yet: a drain waits for them, and nvpool status says why.",
)
STORE_FENCED = _gauge(
    "store_fenced", "1 when the store has stopped serving because it cannot vouch for what it holds."
)
STORE_LEASE = _gauge(
    "store_lease_left_seconds",
    "For how long the target may serve what others hold too; absent where it "
    "holds nothing together with others.",
)
RESYNC_CHAINS = _gauge("resync_chains", "Chains that the target catches up with, by how far it is.", "state")
RESYNC_COPIED = _gauge(
    "resync_copied_bytes", "Copied from others for the chains that it catches up with now."
)
RESYNC_LEFT = _gauge("resync_left_bytes", "Still to be copied, as far as it is known.")
SCRUB_RUNNING = _gauge("scrub_running", "1 while a round of scrubbing reads what nobody reads.")
SCRUB_BLOCKS = _gauge(
    "scrub_round_blocks", "Blocks of 4 KiB of the round that runs, by whether they were read.", "state"
)
SCRUB_BAD = _gauge("scrub_round_bad_blocks", "Bad blocks of the round that runs, or of the last one.")
SCRUB_ENDED = _gauge(
    "scrub_last_round_end_time_seconds", "When the last whole round ended, since 1970; 0: none yet."
)

# -- a metadata shard --------------------------------------------------------------------------------------------------------

META_SERVING = _gauge(
    "meta_serving",
    "1 while this member is the primary of its shard and may answer: it has its lease.",
    "shard",
)
META_INODES = _gauge("meta_inodes", "Inodes of the shard.", "shard")
META_OPEN = _gauge("meta_open_inodes", "Inodes that some session has open.", "shard")
META_SESSIONS = _gauge("meta_sessions", "Sessions of clients.", "shard")
META_LEASES = _gauge(
    "meta_watching_sessions",
    "Sessions that are notified of changes, and may keep attributes until then.",
    "shard",
)
META_RECALLS = _counter(
    "meta_recalls_total", "Leases of attributes that were called back for a change.", "shard"
)
META_RECALLS_LATE = _counter(
    "meta_recalls_waited_out_total", "Of those, the ones whose end was waited for.", "shard"
)
META_LOCKS = _gauge("meta_locks", "Locks that are held.", "shard")
META_LOCK_WAITERS = _gauge("meta_lock_waiters", "Requests that wait for a lock.", "shard")
META_WAITING = _gauge(
    "meta_waiting_requests", "Requests that wait for a sync, a cut, another shard, or a lease.", "shard"
)
META_CHANGES = _counter("meta_changes_total", "Changes that were made.", "shard")
META_REPEATED = _counter(
    "meta_repeated_total", "Changes that were asked for again and answered from their record.", "shard"
)
META_REFUSED = _counter("meta_refused_total", "Requests refused for a reason that the user sees.", "shard")
META_SPANS = _counter("meta_spans_total", "Changes that needed other shards too.", "shard")
META_ORPHANS = _gauge(
    "meta_orphans",
    "Inodes without a name that somebody still has open, or that are not collected yet.",
    "shard",
)
META_TO_COLLECT = _gauge("meta_to_collect", "Inodes whose chunks are to be removed.", "shard")
META_COLLECTED = _counter("meta_collected_total", "Inodes whose chunks were removed.", "shard")
META_BEHIND = _gauge(
    "meta_standby_behind_changes",
    "Replication lag: changes of the primary that this standby does not have.",
    "shard member",
)
META_STANDBY_COUNTS = _gauge(
    "meta_standby_up", "1 while no change is acknowledged that this standby does not have.", "shard member"
)

# -- the supervisor of a node: the pool as its map says, and its processes -------------------------------------------------

POOL_EPOCH = _gauge("pool_map_epoch", "Of the newest pool map on this node.")
POOL_LEADS = _gauge("pool_leads", "1 on the node that decides changes of the map.")
POOL_CHAINS = _gauge(
    "pool_chains",
    "Chains of all replica counts, by state: full; fewer copies than they shall have; none "
    "that serves. Each node reports the same: use max().",
    "state",
)
POOL_COPIES_LEFT = _gauge(
    "pool_copies_left", "Copies of chains that are still to be made: recovery, rebalancing, draining."
)
POOL_FILLING = _gauge("pool_chains_filling", "Chains of which a copy is being made now.")
POOL_MOVING_PAUSED = _gauge("pool_moving_paused", "1 while the operator has paused the moving of chunks.")
POOL_TARGETS = _gauge(
    "pool_targets", "Targets by state (up, down), without those that were removed.", "state"
)
POOL_NODES = _gauge("pool_nodes", "Nodes of the pool.")
POOL_STANDBYS = _gauge("pool_standbys", "Standbys of metadata shards by state (up, syncing).", "state")
SHARD_STANDBYS = _gauge(
    "shard_standbys",
    "Standbys of a shard: how many are wanted, and how many have all records by the pool "
    "map (up). Every node reports the same: use max().",
    "shard state",
)
TARGET_CHAINS_MISSING = _gauge(
    "target_chains_missing",
    "Chains that lack the copy which this target is to hold. Every node reports the same: use max().",
    "target",
)
DRAIN_STALLED = _gauge(
    "drain_stalled_seconds",
    "Seconds for which the drain of this target has made no progress; 0 in the "
    "first minute of a standstill. Every node reports the same: use max().",
    "target",
)
TARGET_CHAINS = _gauge(
    "target_chains",
    "Chains that a target of this node holds (holds), is to get (to_come), and to give away (to_go).",
    "target state",
)
CHILD_RESTARTS = _counter(
    "child_restarts_total", "Deaths of the process since its supervisor began.", "child"
)
CERTIFICATE_LEFT = _gauge(
    "certificate_remaining_seconds",
    "Until a certificate in this node's pool directory ends: its own "
    "(member), that of the pool's CA, and those for etcd. Below 0: it has ended.",
    "kind",
)
SCRAPE_SECONDS = _gauge("scrape_seconds", "How long the processes of this node took to answer this scrape.")

# -- a client: a mount --------------------------------------------------------------------------------------------------------

FUSE_SECONDS = _histogram(
    "fuse_seconds",
    "Requests of the kernel, from the turn in which they were taken to their answer; "
    "of those that were answered in that turn the mean counts. Engine kernel.",
    "op",
)
FUSE_READ_BYTES = _counter(
    "fuse_read_bytes_total",
    "Bytes handed to the kernel as data: of files, and a little of listings. Engine kernel.",
)
FUSE_WRITTEN_BYTES = _counter(
    "fuse_written_bytes_total", "Bytes taken from the kernel by writes. Engine kernel."
)
FUSE_IN_WORK = _gauge("fuse_in_work", "Requests of the kernel that are not answered yet. Engine kernel.")
CLIENT_READS = _counter(
    "client_reads_total",
    "Pieces of reads by the way they came: the store's answer, short-circuit reads "
    "(from the kernel's memory or from the drive), small files kept whole, read-ahead.",
    "way",
)
CLIENT_MESSAGES = _counter("client_messages_total", "Messages to stores that carried them.")
CLIENT_WRITES = _counter("client_writes_total", "Pieces of writes that stores have taken.")
CLIENT_PRIMARY_SILENT = _gauge(
    "client_primary_silent_seconds",
    "For how long the primary of a shard has not answered this client; 0 while it does.",
    "shard",
)
CLIENT_UNSTORED = _gauge("client_unstored_bytes", "Written bytes that no store has yet.")
CLIENT_REPEATS = _counter(
    "client_repeats_total", "Requests that were asked again: by whom they are answered.", "service"
)
CLIENT_HEDGED = _counter(
    "client_hedged_reads_total", "Reads that another replica was asked for too, because the first was slow."
)
CLIENT_MISMATCHES = _counter(
    "client_mismatches_total", "Blocks that came with a wrong checksum and were read elsewhere.", "way"
)
CLIENT_QUESTIONS = _counter(
    "client_metadata_questions_total",
    "Questions to metadata services, changes (change) and others (look).",
    "kind",
)
MOUNT_WORKERS = _gauge("mount_workers", "Processes that serve this mount and have answered.")

# -- the bridge ----------------------------------------------------------------------------------------------------------------

BRIDGE_SECONDS = _histogram(
    "bridge_request_seconds",
    "Calls of container engines answered: the transport is docker or csi.",
    "op transport",
)
BRIDGE_ERRORS = _counter(
    "bridge_request_errors_total",
    "Calls of container engines that were refused or failed.",
    "op transport error",
)
BRIDGE_USES = _gauge("bridge_volume_uses", "Containers, pods and their like that use a volume on this host.")
BRIDGE_UNREPORTED = _gauge(
    "bridge_ended_uses", "Uses that have ended here and have not been reported to the pool yet."
)


# -- durations -------------------------------------------------------------------------------------------------------------

SLOTS = 64
"""Slots of a histogram in memory: slot n counts durations below 2**n microseconds that are at least half of
that."""
FIRST_SLOT, LAST_SLOT = 3, 26
"""Slots in the exposition: from 8 µs to 67 s, doubling. A quantile is off by less than a factor of two,
usually by a tenth."""
BOUNDS_S = tuple((1 << slot) / 1e6 for slot in range(FIRST_SLOT, LAST_SLOT + 1))


class Times:
    """Histogram of durations. `add` costs a third of a microsecond; hot loops inline the code of `add`."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * SLOTS
        self.sum_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` durations of `seconds` each, for operations that completed together."""
        self.counts[int(seconds * 1e6).bit_length()] += count
        self.sum_s += seconds * count

    @property
    def count(self) -> int:
        return sum(self.counts)
