"""Rules for references: docstrings, comments and documentation name modules, classes and methods that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nvpool"
DOCS = ROOT / "docs"
SOURCES = sorted(
    path
    for path in PACKAGE.rglob("*")
    if path.suffix in (".py", ".pyx", ".pxd") and "v1" not in path.relative_to(PACKAGE).parts
)
PAGES = sorted(
    path
    for path in [*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"]
    if "experiments" not in path.parts and "cli" not in path.parts
)

PACKAGES = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
FOLDERS = sorted({path.parent.name for path in SOURCES} - {PACKAGE.name})
MODULE = re.compile(
    rf"(?<![\w./~:{{}}<-])(?:nvpool/)?((?:{'|'.join(FOLDERS)})(?:/[a-z_][a-z_0-9]*)+)(?![\w/-])(?:\.(\w+))?"
)
"""A module or folder by its path in the package: `rpc/api`; also with a name in it: `core/errors.Busy`.

A docstring may leave out the packages that its own module is in, a diagram the top-level package."""
MEMBER = re.compile(r"(?<![\w./-])(_?[A-Z]\w*[a-z]\w*)\.([a-z_]\w*)")
"""A method or attribute of a class: `View.inode`."""
SOURCE_FILE = re.compile(r"(?<![\w./-])\w+\.(?:py|pyx|pxd)\b")
"""A source file without its folder."""
FILES = frozenset(("c", "h", "json", "md", "py", "pxd", "pyi", "pyx", "sock", "toml"))
OTHERS = frozenset(("client/writer", "client/restored", "client/ws1", "node/alpha", "read/write"))
"""Names of certificates and other words, which are written like paths of modules."""
LIBRARIES = frozenset(("SSLObject",))
"""Classes of libraries that references name."""


@cache
def text_of(path):
    return path.read_text()


@cache
def classes():
    """Each class of the package and each message: its base classes, and the texts of the files that define it."""
    found = {}
    for path in SOURCES:
        for name, bases in re.findall(
            r"^\s*(?:cdef |@.*\n)?class (\w+)(?:\(([^)]*)\))?", text_of(path), re.MULTILINE
        ):
            names, texts = found.setdefault(name, (set(), set()))
            names.update(re.findall(r"\w+", bases))
            texts.add(text_of(path))
    for path in (ROOT / "proto").rglob("*.proto"):
        for name in re.findall(r"^\s*message (\w+)", text_of(path), re.MULTILINE):
            found.setdefault(name, (set(), set()))[1].add(text_of(path))
    return found


@cache
def has_member(name, member, seen=()):
    """Whether the text around the class, or around one of its base classes, has the word."""
    bases, texts = classes()[name]
    return any(re.search(rf"\b{member}\b", text) for text in texts) or any(
        has_member(base, member, (*seen, name)) for base in bases if base in classes() and base not in seen
    )


@cache
def source_file_names():
    folders = [PACKAGE, *(ROOT / folder for folder in ("tests", "tools", "bench"))]
    return {path.name for folder in folders for path in folder.rglob("*.p*")}


@cache
def is_alive(path, name, bases):
    """Whether the path names a module, a folder or a file below one of these folders or below the checkout."""
    return any(names_a_module(base + path, name) for base in bases) or any(
        (ROOT / f"{path}{suffix}").exists() for suffix in ("", ".py", f".{name}")
    )


def names_a_module(path, name):
    folder, _, last = path.rpartition("/")
    files = [PACKAGE / folder / f"{last}.{suffix}" for suffix in ("py", "pyx", "pxd", "h", "c")]
    files = [file for file in files if file.exists()]
    if (PACKAGE / path).is_dir():
        return True
    return bool(files) and (
        not name or name in FILES or any(re.search(rf"\b{name}\b", text_of(file)) for file in files)
    )


def dead_references(text, bases=("",)):
    modules = [
        found.group()
        for found in MODULE.finditer(text)
        if found[1] not in OTHERS and not is_alive(found[1], found[2], bases)
    ]
    members = [
        found.group()
        for found in MEMBER.finditer(text)
        if found[1] not in LIBRARIES
        and found[2] not in FILES
        and (found[1] not in classes() or not has_member(found[1], found[2]))
    ]
    return modules + members


def remarks(path):
    """The docstrings and comments of a module."""
    source = text_of(path)
    comments = re.findall(r"(?:^|\s)# (.*)$", source, re.MULTILINE)
    if path.suffix != ".py":
        return "\n".join([*comments, *re.findall(r'"""(.*?)"""', source, re.DOTALL)])
    docstrings = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    return "\n".join([*comments, *docstrings])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_remarks_name_existing_code(path):
    folders = path.relative_to(PACKAGE).parent.parts
    bases = tuple("".join(f"{folder}/" for folder in folders[:depth]) for depth in range(len(folders) + 1))
    assert not dead_references(remarks(path), bases)
    assert not set(SOURCE_FILE.findall(remarks(path))) - source_file_names()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_existing_code(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    quoted = [text for text in re.findall(r"`([^`\n]+)`", prose) if " " not in text]
    assert not dead_references("\n".join(quoted))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_diagrams_name_existing_code(page):
    """Blocks without a language are diagrams; the others are commands, code and files of users."""
    blocks = re.findall(r"^```(\S*)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    diagrams = "\n".join(block for language, block in blocks if not language)
    assert not dead_references(diagrams, ("", *(f"{package}/" for package in PACKAGES)))
    assert not set(SOURCE_FILE.findall(diagrams)) - source_file_names()
