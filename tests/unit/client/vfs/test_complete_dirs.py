"""Complete directories: where a client creates names, it learns all names, so a new name costs one request."""

from __future__ import annotations

import asyncio
import random

import pytest

from nvpool.client.vfs import complete_dirs, lookup_prefetch
from nvpool.core.errors import NameTooLong, NotFound
from nvpool.core.ids import ROOT_INODE
from tests.unit.client.state.test_small_file_cache import EXACT, ME, Case, run
from tests.unit.client.vfs.test_directory_prefetch import META, filled, find, settled


async def is_there(vfs, parent: int, name: bytes) -> bool:
    try:
        await find(vfs, parent, name)
    except NotFound:
        return False
    return True


async def make(vfs, parent: int, name: bytes) -> None:
    """As a kernel does: look the name up, then create it."""
    assert not await is_there(vfs, parent, name)
    await vfs.mknod(parent, name, 0o644, 0, ME)


async def known(case, count: int = 40) -> tuple[int, list[bytes]]:
    """A directory of another client in which this client has created names until it knows all of them."""
    there, names = await filled(case.other, count)
    await case.one.getattr(
        there
    )  # with a lease: an inode that several clients change gets no lease for a while
    for number in range(complete_dirs.MADE_MIN):
        await make(case.one, there, b"first %d" % number)
    await settled(case.one)
    return there, names


def test_new_name_in_a_complete_directory_is_one_request():
    async def main() -> None:
        async with Case(EXACT, META) as case:
            there, names = await known(case)

            async def more() -> None:
                for number in range(50):
                    await make(case.one, there, b"new %d" % number)
                assert await is_there(case.one, there, b"new 7") and await is_there(
                    case.one, there, b"first 1"
                )
                await case.one.unlink(there, b"new 7", ME)
                assert not await is_there(case.one, there, b"new 7")

            _, sent = await case.counted(more())
            assert sent == {"META_CREATE": 50, "META_UNLINK": 1}
            for name in names:
                assert await is_there(case.one, there, name), name

    run(main())


def test_too_long_name_is_refused_in_a_complete_directory():
    async def main() -> None:
        async with Case(EXACT, META) as case:
            born = (await case.one.mkdir(ROOT_INODE, b"born", 0o755, ME)).inode
            for directory in (born, (await known(case))[0]):
                assert not await is_there(case.one, directory, b"x" * 255)
                with pytest.raises(NameTooLong):
                    await find(case.one, directory, b"x" * 256)

    run(main())


def test_changes_of_others_are_seen_in_a_complete_directory():
    async def main() -> None:
        async with Case(EXACT, META) as case:
            there, _ = await known(case)
            await case.other.mknod(there, b"theirs", 0o644, 0, ME)
            assert await is_there(case.one, there, b"theirs")
            await case.other.unlink(there, b"first 0", ME)
            assert not await is_there(case.one, there, b"first 0")
            await case.other.rename(there, b"first 1", there, b"moved", 0, ME)
            assert await is_there(case.one, there, b"moved") and not await is_there(
                case.one, there, b"first 1"
            )

    run(main())


def test_names_changed_during_the_listing_are_known(monkeypatch):
    monkeypatch.setattr(complete_dirs, "STEP_NAMES", 3)

    async def main(seed: int) -> None:
        draw = random.Random(seed)
        async with Case(EXACT, META) as case:
            there, names = await filled(case.other, 40)
            model = set(names)
            for number in range(200):
                vfs = case.one if number < 6 or draw.random() < 0.9 else case.other
                name = (
                    draw.choice(sorted(model))
                    if model and draw.random() < 0.4
                    else b"%d" % draw.randrange(80)
                )
                assert await is_there(vfs, there, name) == (name in model), (seed, number, name)
                if name in model:
                    await vfs.unlink(there, name, ME)
                    model.discard(name)
                else:
                    await vfs.mknod(there, name, 0o644, 0, ME)
                    model.add(name)
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(0)
            await settled(case.one)
            for name in (b"%d" % number for number in range(80)):
                assert await is_there(case.one, there, name) == (name in model), (seed, name)

    for seed in range(12):
        run(main(seed))


def test_large_directory_is_not_listed_for_a_few_names(monkeypatch):
    monkeypatch.setattr(lookup_prefetch, "MISSES_MIN", 1 << 30)  # nor because the names are in sequence
    large = complete_dirs.NAMES_FOR_ONE * complete_dirs.MADE_MIN

    async def main() -> None:
        async with Case(EXACT, META) as case:
            _, sent = await case.counted(known(case, large))
            assert "META_LIST" not in sent

    run(main())


def test_striped_directory_is_not_listed_for_new_names():
    async def main() -> None:
        async with Case(EXACT, META) as case:
            vfs = case.one
            there = (await vfs.mkdir(ROOT_INODE, b"wide", 0o755, ME, wide=True)).inode
            for number in range(complete_dirs.MADE_MIN * 2):
                await make(vfs, there, b"%d" % number)
            await settled(vfs)
            assert await is_there(vfs, there, b"3") and not await is_there(vfs, there, b"30")

    run(main())
