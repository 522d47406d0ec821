"""The commands `nvpool volume`: create, list, change, seal and remove volumes, and grant rights to them.

The commands `encryption` and `trash` use `carry_out` of this module.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nvpool.cli.commands.dir import have_chains
from nvpool.cli.output import ByteSize, json_option, pool_argument, print_json, print_table, say
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import NotFound
from nvpool.core.names import member_named
from nvpool.core.units import format_bytes

if TYPE_CHECKING:
    from nvpool.sdk.volumes import AsyncVolumes, Volume

Result = TypeVar("Result")

_STEP_S = 0.25
_FIELDS = (
    "name, inode, path, bytes_max, files_max (0: no limit), bytes_used, files_used, bytes_reserved, replicas, "
    "chunk_bytes, sealed, trash_s, access, grants, attachments, state, files_removing, created_ns, revoked_in_s, "
    "encrypted, pool_key"
)


@click.group(
    epilog=f"""\b
--json prints volumes as objects:
  {_FIELDS[:100]}
  {_FIELDS[100:]}

\b
examples:
  nvpool volume create /srv/pool scratch --size 100GiB --files 1000000
  nvpool volume ls /srv/pool
  nvpool volume grant /srv/pool models trainer.9f31c2aa ro
  nvpool volume rm /srv/pool scratch --wait
"""
)
def volume() -> None:
    """Create, change and remove volumes: directories below /volumes with a quota, replicas, rights and other policies.

    NAME has 1 to 63 letters, digits, _ . and -, and begins with a letter or digit.
    """


name_argument = click.argument("name")
size_option = click.option("--size", type=ByteSize(), help="Quota in bytes, as 10GiB; 0 is none.")
files_option = click.option(
    "--files", type=click.IntRange(0), help="Quota in files, directories and links; 0 is none."
)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click; 8.1 is supported
    """Click type of a duration, as in 7d. The value is in seconds."""

    name = "time"
    _FACTORS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

    def convert(
        self, value: str | int, parameter: click.Parameter | None, context: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower()
        factor = self._FACTORS.get(text[-1:], 0)
        try:
            exact = float(text[:-1]) * factor if factor else int(text)
            seconds = int(exact)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a time; write it like 3600, 90s, 30m, 12h or 7d", parameter, context)
        if exact and not seconds:  # 0 would mean: not at all
            self.fail(f"{value!r} is less than a second", parameter, context)
        return seconds


def carry_out(pool: str, doing: str, work: Callable[[AsyncVolumes], Awaitable[Result]]) -> Result:
    """Run `work` with the volumes of the pool, and return its result. `doing` names the command in logs."""

    async def run() -> Result:
        from nvpool.cli.pool_path import session
        from nvpool.client.state.vfs_types import Caller
        from nvpool.sdk.async_filesystem import AsyncFileSystem

        async with session(pool, doing) as client:
            return await work(AsyncFileSystem(client, Caller(0, 0)).volumes)

    return asyncio.run(run())


def as_object(found: Volume) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


def _of(used: int, most: int, bytes_: bool) -> str:
    shown = format_bytes if bytes_ else str
    return f"{shown(used)} of {shown(most)}" if most else shown(used)


def _print_volume(found: Volume, as_json: bool) -> None:
    if found.revoked_in_s:
        say(
            f"a target does not answer and may accept the revoked right for up to {found.revoked_in_s} s more; see: "
            "nvpool status POOL"
        )
    if as_json:
        print_json(as_object(found))
        return
    lines = [
        ("name", found.name),
        ("path", found.path),
        ("inode", found.inode),
        ("state", _state(found)),
        ("bytes", _of(found.bytes_used, found.bytes_max, True)),
        ("files", _of(found.files_used, found.files_max, False)),
        ("encrypted", f"with pool key {found.pool_key}" if found.encrypted else "no"),
        ("replicas", found.replicas),
        ("chunks of", format_bytes(found.chunk_bytes)),
        ("trash", f"{found.trash_s} s" if found.trash_s else "off"),
        (
            "access",
            found.access
            if not found.grants
            else f"{found.access}: "
            + ", ".join(f"{client} {rights}" for client, rights in sorted(found.grants.items())),
        ),
        ("attached", ", ".join(found.attachments) or "none"),
    ]
    print_table(("what", "value"), lines)


def _state(found: Volume) -> str:
    if found.state == "removing":
        return f"removing, {found.files_used} of {found.files_removing} files left"
    return "sealed" if found.sealed else found.state


@volume.command(
    epilog="""\b
--json prints the volume, as `nvpool volume show`, and "created": whether it was made now

\b
examples:
  nvpool volume create /srv/pool scratch --size 100GiB
  nvpool volume create 10.0.0.1:17512 models --replicas 3 --chunk-size 4M
  nvpool volume create /srv/pool patients --encrypt
"""
)
@pool_argument
@name_argument
@size_option
@files_option
@click.option(
    "--replicas", type=click.IntRange(1, 3), help="Copies of each chunk; default: as set for /volumes."
)
@click.option("--chunk-size", type=ByteSize(), help="A power of two from 64K to 16M.")
@click.option("--trash", type=Duration(), default=0, help="Keep removed files for this time, as 7d.")
@click.option("--mode", help="Permissions of its directory, in octal (777).")
@click.option(
    "--encrypt", is_flag=True, help="Encrypt the contents of its files; see nvpool encryption --help."
)
@json_option
def create(
    pool: str,
    name: str,
    size: int | None,
    files: int | None,
    replicas: int | None,
    chunk_size: int | None,
    trash: int,
    mode: str | None,
    encrypt: bool,
    as_json: bool,
) -> None:
    """Create a volume. An existing volume with the same settings is left as it is; with others, that is an error."""
    try:
        bits = int(mode, 8) if mode is not None else None
    except ValueError:
        bits = -1
    if bits is not None and not 0 <= bits <= 0o7777:
        raise click.BadParameter(
            f"{mode!r} is not an octal number of permissions, as 755", param_hint="--mode"
        )

    async def make(volumes: AsyncVolumes) -> tuple[Volume, bool]:
        if replicas:
            await have_chains(volumes.client, pool, replicas)
        return await volumes.made(
            name,
            bytes_max=size or 0,
            files_max=files or 0,
            replicas=replicas,
            chunk_bytes=chunk_size,
            trash_s=trash,
            mode=bits,
            encrypted=encrypt,
        )

    found, created = carry_out(pool, "volume create", make)
    if as_json:
        print_json(as_object(found) | {"created": created})
        return
    click.echo(f"volume {name} made" if created else f"volume {name} already exists with these settings")
    _print_volume(found, as_json)


@volume.command(
    "ls",
    epilog="""\b
--json prints a list of volumes, each as `nvpool volume show`

\b
example: nvpool volume ls /srv/pool --all
""",
)
@pool_argument
@click.option("--all", "all_", is_flag=True, help="Also show volumes that are being removed.")
@json_option
def list_(pool: str, all_: bool, as_json: bool) -> None:
    """List the volumes, with their quotas and use."""
    found = carry_out(pool, "volume ls", lambda volumes: volumes.list(removing=all_))
    if as_json:
        print_json([as_object(one) for one in found])
    else:
        print_table(
            ("name", "bytes", "files", "replicas", "access", "attached", "state"),
            [
                (
                    one.name,
                    _of(one.bytes_used, one.bytes_max, True),
                    _of(one.files_used, one.files_max, False),
                    one.replicas,
                    one.access,
                    len(one.attachments),
                    _state(one),
                )
                for one in found
            ],
        )


@volume.command(
    epilog="""\b
example: nvpool volume show /srv/pool scratch --json
"""
)
@pool_argument
@name_argument
@json_option
def show(pool: str, name: str, as_json: bool) -> None:
    """Show a volume: quota, use, rights, and who uses it."""
    _print_volume(carry_out(pool, "volume show", lambda volumes: volumes.show(name)), as_json)


@volume.command(
    epilog="""\b
example: nvpool volume resize /srv/pool scratch --size 200GiB
"""
)
@pool_argument
@name_argument
@size_option
@files_option
@json_option
def resize(pool: str, name: str, size: int | None, files: int | None, as_json: bool) -> None:
    """Change the quota of a volume, while it is in use. The quota cannot be smaller than the use."""
    if size is None and files is None:
        raise click.UsageError("give --size or --files")
    _print_volume(
        carry_out(
            pool, "volume resize", lambda volumes: volumes.resize(name, bytes_max=size, files_max=files)
        ),
        as_json,
    )


@volume.command(
    "set",
    epilog="""\b
examples:
  nvpool volume set /srv/pool home --trash 7d
  nvpool volume set /srv/pool models --access listed
""",
)
@pool_argument
@name_argument
@click.option(
    "--trash", type=Duration(), help="Keep removed files for this time, as 7d; 0 removes them immediately."
)
@click.option(
    "--access",
    type=click.Choice(["open", "listed"]),
    help="Admit every client of the pool, or only clients with a grant.",
)
@json_option
def set_(pool: str, name: str, trash: int | None, access: str | None, as_json: bool) -> None:
    """Change how long a volume keeps removed files, and which clients it admits."""
    if trash is None and access is None:
        raise click.UsageError("give --trash or --access")
    _print_volume(
        carry_out(pool, "volume set", lambda volumes: volumes.set(name, trash_s=trash, access=access)),
        as_json,
    )


@volume.command(
    epilog="""\b
example: nvpool volume seal /srv/pool imagenet
"""
)
@pool_argument
@name_argument
@json_option
def seal(pool: str, name: str, as_json: bool) -> None:
    """Make the contents of a volume immutable, for ever. No file of the volume may be open."""
    _print_volume(carry_out(pool, "volume seal", lambda volumes: volumes.seal(name)), as_json)


@volume.command(
    epilog="""\b
CLIENT is a member of the pool, as `nvpool client ls` shows it. After the first grant only clients with a grant have access;
nodes of the pool, which store the data, always have. `nvpool volume set --access open` admits every client again.

\b
examples:
  nvpool volume grant /srv/pool models trainer.9f31c2aa ro
  nvpool volume grant /srv/pool models client/writer.02b7d1c4 rw
  nvpool volume grant /srv/pool models client/restored.02b7d1c4 ro --force
"""
)
@pool_argument
@name_argument
@click.argument("client")
@click.argument("rights", type=click.Choice(["ro", "rw"]))
@click.option(
    "--force", is_flag=True, help="Even if the pool has no such client, or its members are not known."
)
@json_option
def grant(pool: str, name: str, client: str, rights: str, force: bool, as_json: bool) -> None:
    """Grant a client the right to read a volume (ro), or to read and write it (rw)."""
    if not force:
        _check_client(pool, client)
    _print_volume(
        carry_out(pool, "volume grant", lambda volumes: volumes.grant(name, client, rights)), as_json
    )


@volume.command(
    epilog="""\b
example: nvpool volume revoke /srv/pool models trainer.9f31c2aa
"""
)
@pool_argument
@name_argument
@click.argument("client")
@json_option
def revoke(pool: str, name: str, client: str, as_json: bool) -> None:
    """Revoke a client's right to a volume, also for files that it has open.

    Returns when all targets refuse the client. If a target does not answer within some seconds, a message says so.

    If the client has no right, nothing changes, and a message says so.
    """

    async def run(volumes: AsyncVolumes) -> Volume:
        member, before = member_named(client), await volumes.show(name)
        after = await volumes.revoke(name, client)
        if member not in before.grants:  # a typing error would leave the right of the client that was meant
            say(
                f"{member} has no right of its own to volume {name}; those with one: "
                f"{', '.join(sorted(after.grants)) or 'none'}"
                f"{'' if after.access == 'listed' else ' (every client of the pool gets in)'}"
            )
        return after

    _print_volume(carry_out(pool, "volume revoke", run), as_json)


def _check_client(pool: str, client: str) -> None:
    """Raise NotFound if `client` is no member: a grant to a wrong name would shut out the right client."""
    from nvpool.cli.pool_connection import status_of

    member = member_named(client)
    if member not in asyncio.run(status_of(pool))["members"]:
        raise NotFound(
            f"the pool has no client {member}; see which it has: nvpool client ls {pool} (or --force)"
        )


@volume.command(
    "rm",
    epilog="""\b
--json prints {"name", "removed": whether all of it is gone, "files_left"}

\b
examples:
  nvpool volume rm /srv/pool scratch
  nvpool volume rm /srv/pool scratch --wait
""",
)
@pool_argument
@name_argument
@click.option("--force", is_flag=True, help="Even if the volume is attached somewhere.")
@click.option(
    "--wait",
    is_flag=True,
    help="Wait until the volume is deleted. Ctrl-C stops only the waiting; run the command "
    "again to resume waiting (or it finds no such volume, when all is done).",
)
@json_option
def remove(pool: str, name: str, force: bool, wait: bool, as_json: bool) -> None:
    """Remove a volume and all its files. Its name is gone immediately; the files are deleted in the background.

    Refused while the volume is attached or has open files.
    """
    begun = False

    async def run(volumes: AsyncVolumes) -> Volume | None:
        nonlocal begun
        try:
            going = [await volumes.remove(name, force=force)]
        except FileNotFoundError:
            # the command was interrupted and is repeated
            going = [
                one
                for one in await volumes.list(removing=True)
                if one.name == name and one.state == "removing"
            ]
            if not wait or not going:
                raise
        begun = True
        left, said_s = going[-1], SYSTEM_CLOCK.boottime_s()
        while wait and left is not None:
            await asyncio.sleep(_STEP_S)
            left = await volumes.removing(left.inode)
            if left is not None and SYSTEM_CLOCK.boottime_s() - said_s > 1.0:
                said_s = SYSTEM_CLOCK.boottime_s()
                say(f"{left.files_used} of {left.files_removing} files left")
        return left

    try:
        left = carry_out(pool, "volume rm", run)
    except KeyboardInterrupt:
        if begun:
            say(
                f"{name} is removed; its files are still being deleted. Run the command again to wait; "
                "nvpool volume ls POOL --all shows progress"
            )
        raise
    if as_json:
        print_json(
            {"name": name, "removed": left is None, "files_left": left.files_used if left is not None else 0}
        )
    elif left is not None:
        click.echo(
            f"{name}: removed; {left.files_used} files go in the background, see: nvpool volume ls {pool} --all"
        )
    else:
        click.echo(f"{name}: removed")
