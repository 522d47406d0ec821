"""Operations that user `nobody` tries in a tree of root, through a mount or by the SDK.

test_users_by_socket.py runs this program as root. Prints a JSON object with the outcome of each attempt: the name of an
errno, or the result.

    python attempts_of_a_user.py mount TREE              TREE: its path on the mount
    python attempts_of_a_user.py sdk TREE POOL           TREE: its path in the pool
"""

import errno
import json
import os
import stat
import struct
import sys

ANONYMOUS_ID, GROUP = 65534, 4242
ACL = b"".join(
    [
        struct.pack("<I", 2),
        *(
            struct.pack("<HHI", *entry)
            for entry in (
                (1, 6, 0xFFFFFFFF),
                (2, 6, ANONYMOUS_ID),
                (4, 0, 0xFFFFFFFF),
                (16, 6, 0xFFFFFFFF),
                (32, 0, 0xFFFFFFFF),
            )
        ),
    ]
)
"""u::rw-,u:nobody:rw-,g::---,m::rw-,o::---"""
FILES = {
    "f600": 0o600,
    "f644": 0o644,
    "f666": 0o666,
    "f622": 0o622,
    "group": 0o660,
    "own0": 0,
    "own600": 0o600,
    "own444": 0o444,
    "suid": 0o4777,
    "listed": 0o600,
}
FOLDERS = {
    "d700": 0o700,
    "d711": 0o711,
    "d744": 0o744,
    "d755": 0o755,
    "d777": 0o777,
    "sticky": 0o1777,
    "setgid": 0o2777,
    "mine": 0o700,
    "other": 0o777,
}


def make(place):
    """The tree, by root on a mount."""
    place.mkdir(mode=0o755)
    for name, mode in FOLDERS.items():
        (place / name).mkdir()
        for inner, inner_mode in (("f", 0o666), ("g", 0o644), ("h", 0o644)):
            (place / name / inner).write_text("inner")
            (place / name / inner).chmod(inner_mode)
        (place / name / "empty").mkdir(mode=0o755)
        os.chown(place / name, ANONYMOUS_ID if name == "mine" else 0, GROUP if name == "setgid" else 0)
        (place / name).chmod(mode)
    for name, mode in FILES.items():
        (place / name).write_text("content")
        os.setxattr(
            place / name, "user.a", b"of root"
        )  # the SDK knows of a file without attributes, and sends no request
        os.chown(place / name, ANONYMOUS_ID if name.startswith("own") else 0, GROUP if name == "group" else 0)
        (place / name).chmod(mode)
    os.setxattr(place / "listed", "system.posix_acl_access", ACL)
    os.symlink("f600", place / "link")


def opened(open_at, path, mode):
    with open_at(path, mode) as file:
        return file.read(3).decode() if "r" in mode and "+" not in mode else file.write(b"xyz")


def attempts(do, at):
    """(name, call) in order. `do`: os, or a pool that has the same methods."""
    for name in FILES:
        for mode in ("rb", "r+b", "ab"):
            yield f"open {name} {mode}", lambda name=name, mode=mode: do.open(at(name), mode)
        yield f"stat {name}", lambda name=name: do.stat(at(name))
        yield (
            f"chmod {name}",
            lambda name=name: do.chmod(at(name), 0o600 if name.startswith("own6") else 0o640),
        )
        yield f"user.a of {name}", lambda name=name: do.getxattr(at(name), "user.a")
        yield f"set user.b of {name}", lambda name=name: do.setxattr(at(name), "user.b", b"x")
    for name in FOLDERS:
        yield f"list {name}", lambda name=name: do.list(at(name))
        yield f"stat {name}/f", lambda name=name: do.stat(at(f"{name}/f"))
        yield f"open {name}/f", lambda name=name: do.open(at(f"{name}/f"), "rb")
        yield f"list {name}/empty", lambda name=name: do.list(at(f"{name}/empty"))
        yield f"make {name}/new", lambda name=name: do.open(at(f"{name}/new"), "xb")
        yield f"stat {name}/new", lambda name=name: do.stat(at(f"{name}/new"))
        yield f"mkdir {name}/made", lambda name=name: do.mkdir(at(f"{name}/made"), 0o755)
        yield f"stat {name}/made", lambda name=name: do.stat(at(f"{name}/made"))
        yield f"mkdir {name}/empty", lambda name=name: do.mkdir(at(f"{name}/empty"), 0o755)
        yield f"symlink {name}/s", lambda name=name: do.symlink("f", at(f"{name}/s"))
        yield f"link f666 {name}/l", lambda name=name: do.link(at("f666"), at(f"{name}/l"))
        yield f"link f644 {name}/k", lambda name=name: do.link(at("f644"), at(f"{name}/k"))
        yield f"rename {name}/g", lambda name=name: do.rename(at(f"{name}/g"), at(f"{name}/renamed"))
        yield f"replace {name}/h", lambda name=name: do.rename(at(f"{name}/new"), at(f"{name}/h"))
        yield f"move {name}/empty", lambda name=name: do.rename(at(f"{name}/empty"), at(f"other/{name}"))
        yield f"move {name}/made", lambda name=name: do.rename(at(f"{name}/made"), at(f"other/made-{name}"))
        yield f"remove {name}/f", lambda name=name: do.remove(at(f"{name}/f"))
        yield f"remove {name}/s", lambda name=name: do.remove(at(f"{name}/s"))
        yield f"rmdir {name}/empty", lambda name=name: do.rmdir(at(f"{name}/empty"))
        yield f"remove {name}/none", lambda name=name: do.remove(at(f"{name}/none"))
    for name in ("f644", "f666", "own444", "own600", "d777", "mine"):
        yield f"now {name}", lambda name=name: do.utime(at(name))
        yield f"then {name}", lambda name=name: do.utime(at(name), ns=(10**9, 10**9))
    for name in ("f644", "f666", "own444", "own600"):
        yield f"cut {name}", lambda name=name: do.truncate(at(name), 2)
        for owner in ((0, -1), (ANONYMOUS_ID, -1), (-1, GROUP), (-1, 0), (-1, ANONYMOUS_ID)):
            yield f"chown {name} {owner}", lambda name=name, owner=owner: do.chown(at(name), *owner)
        yield f"stat {name} again", lambda name=name: do.stat(at(name))
    yield "set-gid of own600", lambda: do.chmod(at("own600"), 0o6755)
    yield "stat own600 at last", lambda: do.stat(at("own600"))
    yield "readlink", lambda: do.readlink(at("link"))
    yield "open link", lambda: do.open(at("link"), "rb")
    for name in ("trusted.a", "security.a", "system.posix_acl_access"):
        yield f"set {name} of f666", lambda name=name: do.setxattr(at("f666"), name, ACL)
    yield "list of own600", lambda: do.setxattr(at("own600"), "system.posix_acl_access", ACL)
    yield "capacity", lambda: do.capacity(at("."))
    yield "trusted.a of f666", lambda: do.getxattr(at("f666"), "trusted.a")
    yield "remove user.a of f644", lambda: do.removexattr(at("f644"), "user.a")


class Do:
    """One interface for both."""

    def __init__(self, calls, open_at):
        self._calls, self._open = calls, open_at
        for name in (
            "chmod",
            "rename",
            "link",
            "rmdir",
            "remove",
            "chown",
            "truncate",
            "readlink",
            "setxattr",
            "removexattr",
            "utime",
            "mkdir",
            "symlink",
        ):
            setattr(self, name, getattr(calls, name))

    def open(self, path, mode):
        return opened(self._open, path, mode)

    def list(self, path):
        return sorted(self._calls.list(path) if hasattr(self._calls, "list") else os.listdir(path))

    def stat(self, path):
        found = self._calls.stat(path)
        links = 0 if stat.S_ISDIR(found.st_mode) else found.st_nlink
        return oct(stat.S_IMODE(found.st_mode)), found.st_uid, found.st_gid, links

    def capacity(self, path):
        if hasattr(self._calls, "statfs"):
            return self._calls.statfs(path).blocks_total
        return os.statvfs(path).f_blocks

    def getxattr(self, path, name):
        return self._calls.getxattr(path, name).decode()


def main(way, tree, pool=""):
    import nvpool

    # Later imports may lie where `nobody` may not read.
    import nvpool.client.pool_client
    import nvpool.rpc.transports.stream

    os.umask(0o022)  # the SDK ignores it: this is its default
    os.setgroups([GROUP])
    os.setresgid(ANONYMOUS_ID, ANONYMOUS_ID, ANONYMOUS_ID)
    os.setresuid(ANONYMOUS_ID, ANONYMOUS_ID, ANONYMOUS_ID)
    connected = nvpool.connect(pool) if way == "sdk" else None
    do = Do(connected, connected.open) if connected is not None else Do(os, open)
    found = {}
    for what, call in attempts(do, lambda name: f"{tree}/{name}"):
        try:
            found[what] = call()
        except OSError as error:
            found[what] = errno.errorcode[error.errno]
    if connected is not None:
        connected.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
