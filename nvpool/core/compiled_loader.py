"""Loader of the compiled modules; loads none of them if `NVPOOL_PURE=1` is set.

Each compiled module has a Python implementation with the same results. The Python implementation is several
times slower, so nvpool uses it only on request: a missing compiled module is an error, never a slower pool.
`NVPOOL_PURE=1` applies to the build (nothing is compiled) and to every process that runs from such an
installation.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

PURE_VARIABLE = "NVPOOL_PURE"
IS_PURE = os.environ.get(PURE_VARIABLE, "") not in ("", "0")
"""True if this process runs without compiled modules."""


def load_compiled(name: str) -> Any | None:
    """Return the compiled module `name`, or None in a process that runs with `NVPOOL_PURE=1`.

    ImportError: the module is not installed or does not fit this Python; the text says how to install the
    module.
    """
    if IS_PURE:
        return None
    try:
        return importlib.import_module(name)
    except ImportError as error:
        text = (
            f"{name} is not compiled for this Python ({error}): install nvpool again with a compiler and the headers of "
            f"liburing, or set {PURE_VARIABLE}=1 to run without compiled modules, several times slower"
        )
        raise ImportError(text, name=error.name, path=error.path) from error


class _SourceFinder:
    """Finds the source of a typed module (a `.py` beside a `.pxd`) where its compiled form is installed too."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As importlib.abc.MetaPathFinder."""
        if not name.startswith("nvpool.") or path is None:
            return None
        for place in path:
            spec = FileFinder(place, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(name)
            if spec is not None:
                return spec
        return None


def prefer_sources() -> None:
    """Import the typed modules from their sources, if this process runs without compiled modules."""
    if IS_PURE and _SourceFinder not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _SourceFinder)
