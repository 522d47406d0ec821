"""Health checks of certificates that expire soon, for `nvpool status` and `nvpool doctor`.

Certificates of members live 90 days and are renewed automatically when 30 days are left. Other certificates
are not renewed automatically; their notice appears at the same time before their end. If a member's
certificate has had less than 30 days left for a day, its renewal failed, and the problem says why. Used by
node/status and the CLI.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from nvpool.core.names import SKEW_S
from nvpool.poolmap.health_checks import HealthProblem, Severity

DAY_S = 86_400.0
NOTICE_S, RISK_S = 30 * DAY_S, 7 * DAY_S
LATE_S = DAY_S
"""Time that the pool may take to renew a certificate before the delay is a problem."""
NAMES = {
    "authority": "the pool's CA",
    "member": "this node",
    "etcd-authority": "the CA of etcd",
    "etcd-member": "this node for etcd",
    "external-etcd-authority": "the CA of your etcd",
    "external-etcd-member": "this node for your etcd",
}
"""Description by kind, as in node/admin/certificate_store."""

_RENEWED = frozenset(("member", "etcd-member"))
"""Kinds that are renewed automatically."""
State = Literal["well", "notice", "risk", "ended"]
_SEVERITIES: dict[State, Severity] = {"notice": "notice", "risk": "degraded", "ended": "unavailable"}


def state_of(kind: str, begins_s: float, ends_s: float, now_s: float) -> State:
    """Classify a certificate by its remaining life.

    Short-lived certificates have shorter limits: a third and a twelfth of their life.
    """
    left_s, life_s = ends_s - now_s, ends_s - (begins_s + SKEW_S)
    if left_s <= 0:
        return "ended"
    if left_s < min(RISK_S, life_s / 12):
        return "risk"
    notice_s = min(NOTICE_S, life_s / 3)
    if kind in _RENEWED:
        notice_s -= min(LATE_S, life_s / 12)
    return "notice" if left_s < notice_s else "well"


def remedy_of(kind: str, node: str) -> str:
    if kind.startswith("external"):
        return "put new files of your etcd's CA into secret/external-etcd of the pool directory, on each node"
    if kind not in _RENEWED:
        return (
            "a CA is not renewed: make a new pool before, and copy the files (nvpool export POOL:/ DIR, and then "
            "nvpool import DIR NEW_POOL:/)"
        )
    return f"nvpool cert rotate {node}   and see that the clocks of all nodes are right"


def problems(
    certificates: Iterable[Mapping[str, Any]], now_s: float, *, node: int, pool: str, trouble: str
) -> list[HealthProblem]:
    """Return the problems of a node's certificates, as node/admin/certificate_store reports them.

    `trouble` is the reason why the node's own certificate could not be renewed.
    """
    found = []
    for one in certificates:
        kind = one["kind"]
        state = state_of(kind, one["begins_s"], one["ends_s"], now_s)
        if state == "well":
            continue
        days = abs(one["ends_s"] - now_s) / DAY_S
        when = f"ended {days:.1f} days ago" if state == "ended" else f"ends in {days:.1f} days"
        why = ""
        if kind in _RENEWED:
            why = f", and was not renewed: {trouble or 'the supervisor has not tried yet; it does so every hour'}"
        found.append(
            HealthProblem(
                "certificate",
                f"the certificate of {NAMES[kind]} {when}{why}",
                remedy_of(kind, pool),
                _SEVERITIES[state],
                node=node,
                name=kind,
            )
        )
    return found
