"""The command `nvpool metrics`: print the metrics of a node in the Prometheus format."""

from __future__ import annotations

import asyncio

import click

from nvpool.cli.output import Number, json_option, print_json, remember_pool


@click.command(
    epilog="""\b
The metrics are those of the supervisor of the node that POOL names, and of all its processes. Prometheus can fetch the same
page by HTTP: set listen in section [metrics] of node.toml. "9477" serves programs of this machine, "unix:/PATH" a socket for
root and the operator group, and "HOST:PORT" every host of the network, without a password. A mount serves its own metrics
with `nvpool mount --metrics`, which takes the same values.
docs/reference/metrics.md explains each name, docs/operate/monitor.md the configuration of Prometheus.

\b
examples:
  nvpool metrics /srv/pool
  nvpool metrics /srv/pool | promtool check metrics
  nvpool metrics /srv/pool > /var/lib/prometheus/node-exporter/nvpool.prom      for its textfile collector
  nvpool metrics --describe                                                     every name and its meaning
"""
)
@click.argument("pool", envvar="NVPOOL_POOL", required=False, callback=remember_pool)
@click.option(
    "--wait",
    "wait_s",
    type=Number(0.1, 30),
    default=2.0,
    show_default=True,
    help="Seconds to wait for the processes of the node; one that does not answer has nvpool_up 0.",
)
@click.option("--describe", is_flag=True, help="Only print the list of metrics: name, kind, labels, meaning.")
@json_option
def metrics(pool: str | None, wait_s: float, describe: bool, as_json: bool) -> None:
    """Print the metrics of a node, as Prometheus reads them.

    POOL is the pool's directory, or HOST:PORT of a node; default: NVPOOL_POOL, else the current directory.
    """
    from nvpool.metrics.exposition import Page, table
    from nvpool.metrics.registry import METRICS

    if describe:
        if as_json:
            print_json([metric._asdict() for metric in METRICS.values()])
        else:
            click.echo(table())
        return
    from nvpool.cli.pool_connection import ask
    from nvpool.rpc.v1.pool_pb2 import MetricsReply, MetricsRequest
    from nvpool.rpc.v1.wire_pb2 import PROCESS_METRICS

    reply = asyncio.run(
        ask(
            pool or ".",
            PROCESS_METRICS,
            MetricsRequest(node=True, wait_s=wait_s),
            MetricsReply,
            wait_s=wait_s + 5.0,
        )
    )
    page = Page.unpack(reply.page)
    if as_json:
        print_json(page.json_samples())
    else:
        click.echo(page.text(), nl=False)
