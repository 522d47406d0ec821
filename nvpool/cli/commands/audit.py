"""The command `nvpool audit`: show who changed a pool through this node, and who was refused."""

from __future__ import annotations

import datetime
from typing import Any

import click

from nvpool.cli.output import json_option, pool_argument, print_json, print_table


class PointInTime(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click; 8.1 is supported
    """Click type of a point in time, given as a time or as an age. The value is in seconds since 1970."""

    name = "time"

    def convert(
        self, value: str | float, parameter: click.Parameter | None, context: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        from nvpool.cli.commands.volume import Duration
        from nvpool.core.clock import SYSTEM_CLOCK

        try:
            return datetime.datetime.fromisoformat(value).astimezone().timestamp()
        except (ValueError, OverflowError):
            pass
        try:
            return SYSTEM_CLOCK.wall_ns() / 1e9 - Duration().convert(value, parameter, context)
        except click.BadParameter:
            self.fail(
                f"{value!r} is not a time; write how long ago, like 90s, 12h or 7d, or a time like 2026-11-27T08:00",
                parameter,
                context,
            )


@click.command(
    epilog="""\b
The log is log/audit.log in the pool's directory, with one JSON object per line, and four older files of 8 MiB. Each node
logs the changes requested there, and those of volumes whose metadata it serves. Under systemd, the events also go to the
journal: journalctl -t nvpool-audit. Only root, the user of the daemons and the operator group ([access] operators in
node.toml) may read the log.

\b
--json prints one object for each event: time, event (start, stop, token, join, member-remove, node-*, drive-*, shard-*,
etcd-recover, rebalance, replicas, scrub, certificate-renew, certificate-rotate, authority-keys, volume-*, trash-*, dump, load),
result (done; refused: the caller has no right; failed), who (member of a certificate, or uid, user, login_user, pid, command,
or unknown), from, process, what (arguments, no secrets), error, left_out (number of events before it that were not written,
because there were too many)

\b
examples:
  nvpool audit /srv/pool --since 24h
  nvpool audit /srv/pool --json | jq '.[] | select(.result == "refused")'
"""
)
@pool_argument
@click.option(
    "--since",
    type=PointInTime(),
    help="Only events since then: an age like 12h or 7d, or a time like 2026-11-27T08:00.",
)
@json_option
def audit(pool: str, since: float | None, as_json: bool) -> None:
    """Print the audit log of a node: who changed the pool, granted or revoked rights, joined, or was refused."""
    from nvpool.cli.pool_connection import directory_of
    from nvpool.core.errors import InvalidRequest, from_os_error
    from nvpool.security.audit_format import FILE, read_audit

    directory = directory_of(pool)
    if directory is None:
        raise InvalidRequest(
            f"{pool} is an address; the audit log is read in the pool's directory, on the node itself"
        )
    try:
        found = [
            record for record in read_audit(directory.log / FILE) if since is None or _time(record) >= since
        ]
    except OSError as error:
        raise from_os_error(error, f"read the audit log {directory.log / FILE}") from None
    if as_json:
        print_json(found)
    else:
        print_table(
            ("time", "event", "result", "who", "from", "what"),
            [
                (
                    record.get("time"),
                    record["event"],
                    record.get("result"),
                    who_of(record),
                    record.get("from"),
                    _what(record),
                )
                for record in found
            ],
        )


def _time(record: dict[str, Any]) -> float:
    try:
        return datetime.datetime.fromisoformat(str(record.get("time", ""))).timestamp()
    except ValueError:
        return 0.0


def who_of(record: dict[str, Any]) -> str:
    who = record.get("who") or {}
    if "member" in who:
        member: str = who["member"]
        return member
    if "uid" not in who:
        return "unknown"
    login = f", logged in as {who['login_user']}" if "login_user" in who else ""
    command = f"{who['command']} " if who.get("command") else ""
    return f"{who.get('user')} ({command}{who.get('pid')}{login})"


def _what(record: dict[str, Any]) -> str:
    words = [f"{name}={value}" for name, value in (record.get("what") or {}).items()]
    if error := record.get("error"):
        words.append(f"({error})")
    return " ".join(words)
