"""Only what pyproject.toml can not say: the compiled modules, each left out where it does not compile."""

from glob import glob

from setuptools import Extension, setup

SHARED = sorted(glob("nvpool/*/*.h") + glob("nvpool/*/*.pxd"))


def module(name: str, *libraries: str) -> Extension:
    return Extension(f"nvpool.{name}", [f"nvpool/{name.replace('.', '/')}.pyx"], depends=SHARED, libraries=list(libraries),
                     include_dirs=["nvpool/base", "nvpool/drive", "nvpool/fuse", "nvpool/wire"], extra_compile_args=["-O2"],
                     optional=True)


setup(ext_modules=[module("base._blocks"), module("base._xts"), module("client._plainwrites"), module("drive._uring", "uring"),
                   module("fuse._creates"), module("fuse._farreads"), module("fuse._known"),
                   module("fuse._plainreads", "uring"), module("fuse._smallreads"), module("fuse._writes"),
                   module("kv._record"), module("meta._atonce"), module("store._atonce", "uring"),
                   module("store._newwrites"), module("store._reads"), module("wire._frame"), module("wire._ucx")])
