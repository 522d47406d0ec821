"""Only what pyproject.toml can not say: the compiled modules.

A module that does not compile fails the build: without it a pool is several times slower. `NVPOOL_PURE=1` builds none of them;
processes that run from such an installation need `NVPOOL_PURE=1` in their environment too.

Translation to C and compilation use all processors.
"""

import os
import re
from pathlib import Path, PurePath

from setuptools import Extension, setup

IS_PURE = os.environ.get("NVPOOL_PURE", "") not in ("", "0")
PROCESSORS = len(os.sched_getaffinity(0))
LIBRARIES = {"liburing.h": "uring"}
"""Header -> library. A module is linked with the libraries of the headers that it or a .pxd it uses includes."""
TYPED = sorted(
    path.with_suffix(".py")
    for path in Path("nvpool").rglob("*.pxd")
    if path.with_suffix(".py").exists() and not path.with_suffix(".pyx").exists()
)
"""Python modules beside a .pxd that gives their classes and functions C types; they also run interpreted."""
TYPED_DIRECTIVES = {"annotation_typing": False, "nonecheck": True, "boundscheck": True, "wraparound": True}
SOURCES = sorted([*Path("nvpool").rglob("*.pyx"), *TYPED])
TYPED_C = Path("build/typed")
SHARED = sorted([*Path("nvpool").rglob("*.h"), *Path("nvpool").rglob("*.pxd")])


def used_by(source: Path) -> list[Path]:
    """Headers and .pxd files that a module uses, directly or through another one: a change compiles it again."""
    found: list[Path] = []
    waiting = [source, source.with_suffix(".pxd")]
    while waiting:
        path = waiting.pop()
        if path in found or not path.exists():
            continue
        found.append(path)
        text = path.read_text()
        waiting += [one for one in SHARED if _is_named(one, text)]
    return sorted(path for path in found if path != source)


def _is_named(shared: Path, text: str) -> bool:
    if shared.suffix == ".h":
        return f'"{shared.name}"' in text
    package, _, name = _module(shared).rpartition(".")
    return f"{package}.{name} cimport" in text or bool(
        re.search(rf"{re.escape(package)} cimport[^\n]*\b{name}\b", text)
    )


def libraries(source: Path) -> list[str]:
    texts = [path.read_text() for path in (source, *used_by(source))]
    return [library for header, library in LIBRARIES.items() if any(f'"{header}"' in one for one in texts)]


def _module(source: PurePath) -> str:
    return ".".join(source.with_suffix("").parts)


def extension(source: Path) -> Extension:
    return Extension(
        _module(source),
        [str(source)],
        depends=[str(path) for path in used_by(source)],
        libraries=libraries(source),
        include_dirs=sorted({str(path.parent) for path in SHARED if path.suffix == ".h"}),
        extra_compile_args=[
            "-O2",
            "-g1",
            "-fwrapv",
        ],  # differences of times may overflow; they are compared first
    )


def remove_outdated_c(source: Path) -> None:
    """Remove the C source of a module that is older than a header that the module uses, so that it is made again.

    Cython does not notice a change of a .pxd that is named as in `from nvpool.core cimport primitives`.
    """
    made = (TYPED_C / source if source in TYPED else source).with_suffix(".c")
    if made.exists() and any(path.stat().st_mtime > made.stat().st_mtime for path in used_by(source)):
        made.unlink()


def extensions() -> list[Extension]:
    if IS_PURE:
        return []
    from Cython.Build import cythonize

    # The longest first, so that no processor waits for one at the end.
    found = [
        extension(source) for source in sorted(SOURCES, key=lambda path: path.stat().st_size, reverse=True)
    ]
    for one in found:
        remove_outdated_c(Path(one.sources[0]))
    typed = {str(path) for path in TYPED}
    untyped = [one for one in found if one.sources[0] not in typed]
    typed_ones = [one for one in found if one.sources[0] in typed]
    return cythonize(untyped, nthreads=PROCESSORS, language_level=3) + cythonize(
        typed_ones,
        nthreads=PROCESSORS,
        language_level=3,
        compiler_directives=TYPED_DIRECTIVES,
        build_dir=str(TYPED_C),  # the C sources: beside the modules their names would be those of the modules
    )


# From Python 3.14 on, the processes that translate import this file again if it was run as a script.
if __name__ == "__main__":
    setup(ext_modules=extensions(), options={"build_ext": {"parallel": PROCESSORS}})
