"""The commands `nvpool client`: admit, list and remove machines that use a pool but provide no drives."""

from __future__ import annotations

import asyncio

import click
from msgspec.structs import replace

from nvpool.cli.commands.node import entered, make_token
from nvpool.cli.output import Number, json_option, pool_argument, print_json, print_table, say
from nvpool.cli.token_input import WAYS, token_options
from nvpool.core import config as configuration
from nvpool.core.names import users_of


def _user(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """Parse UID or UID:GID; the default of GID is the number of UID."""
    if text is None:
        return None
    uid, colon, gid = text.partition(":")
    numbers = (uid, gid if colon else uid)
    if not all(number.isascii() and number.isdigit() and 0 < int(number) < 0xFFFFFFFF for number in numbers):
        raise click.BadParameter(f"{text!r} is not a user: write UID or UID:GID, numbers from 1 on")
    return int(numbers[0]), int(numbers[1])


@click.group(
    epilog="""\b
examples:
  nvpool client token /srv/nvpool                       on a node
  nvpool client join 10.0.0.1:17512 ~/pool              prompts for the token
  nvpool mount ~/pool /mnt/pool
"""
)
def client() -> None:
    """Admit, list and remove clients: machines that use a pool without being nodes."""


@client.command(epilog="example: nvpool client token /srv/nvpool")
@pool_argument
@click.option(
    "--hours", type=Number(0.001, 168), default=1.0, show_default=True, help="How long the token is valid."
)
@click.option(
    "--uid",
    "acts_as",
    callback=_user,
    metavar="UID[:GID]",
    help="Treat every request of the client as one of "
    "this user and group. Default: the client is trusted to name the user of each request, as a node is.",
)
@click.option(
    "--squash-root",
    is_flag=True,
    help="Map root on the client to the user 65534, like root_squash of NFS; the "
    "client is trusted to name its other users.",
)
@json_option
def token(pool: str, hours: float, acts_as: tuple[int, int] | None, squash_root: bool, as_json: bool) -> None:
    """Print the command with which another machine joins the pool as a client. Its token works once."""
    if acts_as is not None and squash_root:
        raise click.UsageError(
            "a client with --uid acts as that user alone, its root too; give --uid or --squash-root"
        )
    make_token(pool, "client", hours, as_json, acts_as, squash_root)


@client.command(
    epilog=WAYS
    + """
\b
examples:
  NVPOOL_TOKEN=nvp1.XXXX nvpool client join 10.0.0.1:17512 ~/pool
  nvpool client join 10.0.0.1:17512 ~/pool --token - < token
"""
)
@click.argument("address", metavar="HOST:PORT")
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@token_options("client")
@click.option("--name", default="", help="Name of this client in lists; default: the host name.")
@click.option("--plain-text", is_flag=True, help="Without certificates and TLS, if the nodes have none.")
@json_option
def join(address: str, directory: str, token_text: str, name: str, plain_text: bool, as_json: bool) -> None:
    """Join a pool as a client: create DIR, which stands for the pool in mounts, the SDK and other commands."""
    config = configuration.Config()
    config = replace(config, network=replace(config.network, plain_text=plain_text))
    done = entered("client", address, directory, token_text, config, name)
    if as_json:
        print_json(done)
    else:
        click.echo(
            f"{done['member']} is a client of the pool {done['name']} ({done['pool_id'][:8]}), in {done['directory']}"
        )
        say(f"mount it with: nvpool mount {directory} MOUNTPOINT")


@client.command(epilog="example: nvpool client ls /srv/nvpool")
@pool_argument
@json_option
def ls(pool: str, as_json: bool) -> None:
    """List the clients and bridges that have a certificate of the pool."""
    from nvpool.cli.pool_connection import status_of

    clients = [member for member in asyncio.run(status_of(pool))["members"] if not member.startswith("node/")]
    if as_json:
        print_json(clients)
    else:
        print_table(("client", "acts as"), [(member, users_of(member)) for member in clients])


@client.command(epilog="example: nvpool client remove /srv/nvpool client/ws1.0a1b2c3d")
@pool_argument
@click.argument("member", metavar="CLIENT")
@json_option
def remove(pool: str, member: str, as_json: bool) -> None:
    """Revoke the certificate of CLIENT: its connections end, and the pool refuses new ones."""
    from nvpool.cli.pool_connection import change

    done = asyncio.run(change(pool, "member-remove", {"member": member}))
    if as_json:
        print_json(done)
    else:
        click.echo(f"{member} is not in the pool any more")
