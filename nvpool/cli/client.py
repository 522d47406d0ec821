"""`nvpool client token|join`: machines that use a pool and give it nothing."""

from __future__ import annotations

import click
from msgspec.structs import replace

from nvpool.base import config as configuration
from nvpool.cli.node import entered, make_token
from nvpool.cli.render import json_option, pool_argument, print_json, say


@click.group(epilog="""\b
examples:
  nvpool client token /srv/nvpool                       on a node
  nvpool client join 10.0.0.1:17512 ~/pool --token nvp1.XXXX
  nvpool mount ~/pool /mnt/pool
""")
def client() -> None:
    """Let clients that are no nodes into a pool."""


@client.command(epilog="example: nvpool client token /srv/nvpool")
@pool_argument
@click.option("--hours", type=click.FloatRange(0.001, 168), default=1.0, show_default=True, help="How long it is good.")
@json_option
def token(pool: str, hours: float, as_json: bool) -> None:
    """Print a command with which another machine gets a certificate. The token in it works once."""
    make_token(pool, "client", hours, as_json)


@client.command(epilog="example: nvpool client join 10.0.0.1:17512 ~/pool --token nvp1.XXXX")
@click.argument("address", metavar="HOST:PORT")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--token", "token_text", required=True, help="As `nvpool client token` printed it.")
@click.option("--name", default="", help="Name of this client, for people; default: the host's.")
@click.option("--plain-text", is_flag=True, help="Without certificates and TLS: as on the nodes.")
@json_option
def join(address: str, directory: str, token_text: str, name: str, plain_text: bool, as_json: bool) -> None:
    """Make DIR, which stands for the pool on this machine: mount it, or give it to the SDK and to other commands."""
    config = configuration.Config()
    config = replace(config, network=replace(config.network, plain_text=plain_text))
    done = entered("client", address, directory, token_text, config, name)
    if as_json:
        print_json(done)
    else:
        click.echo(f"{done['member']} is a client of the pool {done['name']} ({done['pool_id'][:8]}), in {done['directory']}")
        say(f"mount it with: nvpool mount {directory} MOUNTPOINT")
