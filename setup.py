"""Only what pyproject.toml can not say: the compiled modules, each left out where it does not compile."""

from pathlib import Path, PurePath

from setuptools import Extension, setup

LIBRARIES = {"liburing.h": "uring"}
"""Header -> library. A module is linked with the libraries of the headers that it or a .pxd it uses includes."""
SOURCES = sorted(Path("nvpool").rglob("*.pyx"))
SHARED = sorted([*Path("nvpool").rglob("*.h"), *Path("nvpool").rglob("*.pxd")])


def libraries(source: Path) -> list[str]:
    text = source.read_text()
    used = [text, *(path.read_text() for path in SHARED if path.suffix == ".pxd" and f"{_module(path)} cimport" in text)]
    return [library for header, library in LIBRARIES.items() if any(f'"{header}"' in one for one in used)]


def _module(source: PurePath) -> str:
    return ".".join(source.with_suffix("").parts)


def extension(source: Path) -> Extension:
    return Extension(_module(source), [str(source)], depends=[str(path) for path in SHARED], libraries=libraries(source),
                     include_dirs=sorted({str(path.parent) for path in SHARED if path.suffix == ".h"}),
                     extra_compile_args=["-O2"], optional=True)


setup(ext_modules=[extension(source) for source in SOURCES])
