"""The command `nvpool status`: show the processes, nodes, drives and problems of a pool."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from nvpool.cli.output import Number, ago, json_option, print_json, print_table, remember_pool, say
from nvpool.core.units import format_bytes


@click.command(
    epilog="""\b
--json prints one object:
  pool        id, name, epoch of the pool map, fixed settings, directory, state (serving, degraded)
  processes   role (supervisor, meta, store, mount, reader, holder; of other nodes only meta and store), node, pid (0: it does
              not run; null: of another node), state (starting, serving,
              restarting, draining, fenced, waiting (a primary without a lease), promoting, lost (a standby without its
              records), away (its drive is), silent: it runs but does not answer, stopped, dead: a mount whose process is gone,
              to be unmounted), restarts, since_ms, endpoints, counters; of a shard inodes, sessions, to_collect,
              member and in_map (primary; up: has everything; syncing: has not); of a target
              drive, path, used_bytes, read_path, direct, writes (how large ones go: direct, or cached where the drive takes
              no direct ones), host_full (a sentence when the file system below is full), and bad_blocks: inode, index (of the
              chunk), block, text, path (null: not found soon, `nvpool fsck` finds it; empty: the file has no name any more);
              refused (why its heartbeats are not answered; empty: they are), serving_pid; scrub (see nvpool scrub status
              --json); of a mount mountpoint, engine (kernel, pyfuse3)
  nodes, drives, shards    as `nvpool node ls --json`, `nvpool drive ls --json`, `nvpool shard ls --json`
  members     who has a certificate of the pool
  certificates  of this node: kind (authority, member, etcd-authority, etcd-member), member, serial, begins_s, ends_s
  chains      replicas (counts that there are chains for), total, full, fewer (than they shall have copies), without (any that
              serves), filling, to_copy (copies still to be made), bytes_left (an estimate), seconds_left (null: not known),
              paused, limit_bytes_s
  problems    sentences; none when all is well. Plain text, which is a choice, is reported in health alone
  health      exit_code (of this command), problems: of each kind, severity (unavailable, degraded, damaged, notice), node,
              name (of the process), target, drive, shard, member (null: it concerns none), count (chains, standbys),
              reason, remedy (what to run or do; empty: nothing), since_ms (since when that node knows of it), text (the
              sentence). Kinds: node-silent, process-down, target-left-out, data-unavailable, copies-missing, shard-no-primary,
              shard-no-standby, standby-missing, shard-at-risk, drain-stalled, drive-away, drive-full, drive-no-room,
              host-full, map, bad-block, data-lost, mount-dead, certificate, plain-text

\b
exit codes:
  0    all is well, apart from dead mounts on this node
  3    something cannot be read or written, or has too few copies, standbys or members, a drain makes no progress, or a
       drive is almost full: each problem is printed with its remedy. For some seconds this is also the code after the
       death of a process that restarts by itself: see since
  4    stored data is damaged or lost, and nothing else is wrong

\b
examples:
  nvpool status /srv/pool
  nvpool status 10.0.0.1:17512 --json | jq '.processes[] | select(.role == "store").pid'
  nvpool status /srv/pool --check || echo something is wrong
"""
)
@click.argument("pool", envvar="NVPOOL_POOL", required=False, callback=remember_pool)
@click.option(
    "--wait",
    "wait_s",
    type=Number(0.1, 600),
    default=5.0,
    show_default=True,
    help="Seconds to wait for an answer.",
)
@click.option(
    "--check", is_flag=True, help="Exit with 3 also while a process starts or stops, or a mount is dead."
)
@json_option
def status(pool: str | None, wait_s: float, check: bool, as_json: bool) -> int:
    """Show a pool: its processes, nodes, drives and problems.

    POOL is the pool's directory, or HOST:PORT of a node; default: NVPOOL_POOL, else the current directory.
    """
    from nvpool.cli.pool_connection import status_of

    seen = asyncio.run(status_of(pool or ".", wait_s))
    if as_json:
        print_json(seen)
    else:
        _show(seen)
    code: int = seen.get("health", {}).get("exit_code", 0)  # an earlier version has no health
    if check and (seen["problems"] or any(process["state"] != "serving" for process in seen["processes"])):
        return code or 3
    return code


def _show(seen: dict[str, Any]) -> None:
    from nvpool.cli.commands.drive import print_drives
    from nvpool.cli.commands.node import print_nodes
    from nvpool.cli.commands.pool import chains_line
    from nvpool.core.clock import SYSTEM_CLOCK

    now_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000
    pool = seen["pool"]
    click.echo(
        f"pool {pool['name']} ({pool['id'][:8]}): {pool['state']}, map epoch {pool['epoch']}, "
        f"{format_bytes(pool['chunk_bytes'])} chunks, {pool['replicas']} replica{'s' if pool['replicas'] > 1 else ''}"
    )
    click.echo()
    print_table(
        ("role", "name", "node", "pid", "state", "for", "restarts", "what"),
        [
            (
                process["role"],
                process.get("name"),
                process["node"],
                process["pid"] or None,
                process["state"],
                ago(process["since_ms"], now_ms) if process["since_ms"] else None,
                process.get("restarts"),
                _what(process),
            )
            for process in seen["processes"]
        ],
    )
    click.echo()
    if len(seen["nodes"]) > 1:
        print_nodes(seen["nodes"])
        click.echo()
    print_drives(seen["drives"])
    click.echo(f"\n{chains_line(seen['chains'])}")
    for problem in seen.get("health", {}).get("problems", ()):
        say(f"problem: {problem['reason']} (since {ago(problem['since_ms'], pool['now_ms'])})")
        if problem["remedy"]:
            say(f"  remedy: {problem['remedy']}")
    if "health" not in seen:
        for problem in seen["problems"]:
            say(f"problem: {problem}")


def _what(process: dict[str, Any]) -> str:
    if process.get("in_map") in ("up", "syncing"):
        return "standby, has everything" if process["in_map"] == "up" else "standby, catching up"
    if process["role"] == "meta" and "inodes" in process:
        return f"{process['inodes']:,} inodes, {process['sessions']} sessions"
    if process["role"] == "store" and "read_path" in process:
        how = (
            ", O_DIRECT"
            if process.get("direct")
            else ", cached writes"
            if process.get("writes") == "cached"
            else ""
        )
        return f"{process['kind']}, {process['read_path']}{how}"
    if process["role"] == "supervisor":
        return next((endpoint for endpoint in process["endpoints"] if endpoint.startswith("stream://")), "")
    if process.get("mountpoint"):
        mounted: str = process["mountpoint"] + (
            f", engine {process['engine']}" if process.get("engine") else ""
        )
        return mounted
    reason: str = process.get("reason") or ""
    return reason
