"""Reference page of the Python SDK, from signatures and docstrings in its sources; used by tools/make_reference.py.

The sources are parsed and not imported, so that a default such as 0o755 appears as it is written.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SDK = Path(__file__).resolve().parent.parent / "nvpool" / "sdk"
CONTENT = (
    ("filesystem.py", "connect"),
    ("async_filesystem.py", "connect_async"),
    ("filesystem.py", "FileSystem"),
    ("async_filesystem.py", "AsyncFileSystem"),
    ("open_file.py", "AsyncFile"),
    ("volumes.py", "Volumes"),
)
"""Module and name of each part, in the order of the page."""
ASYNCHRONOUS = {
    "FileSystem": ("async_filesystem.py", "AsyncFileSystem"),
    "Volumes": ("volumes.py", "AsyncVolumes"),
}
"""Class -> asyncio class with the same methods: a method without a docstring has that of the asyncio method."""
INTERNAL = {
    "FileSystem": {"runtime", "is_served_by", "forget_parent"},
    "AsyncFileSystem": {"connect", "open_handle", "read_planned"},
}
"""Methods that other parts of the SDK use."""
INTRODUCTION = """# Python SDK

Reference of `nvpool.connect`, `nvpool.connect_async` and the objects that they return. First steps:
[Python SDK](../tutorial/python-sdk.md). Promises to a program, and differences to a mount:
[Semantics](semantics.md#through-the-sdk).

Errors are `OSError` and its subclasses; `filename` is the path that the program passed. `FileSystem.volumes` is a `Volumes`
object; `AsyncFileSystem.volumes` has the same methods as coroutines.
"""
_ERRORS = re.compile(r"[A-Z]\w+(?:, [A-Z]\w+)* {2,}\S")
"""Begin of a paragraph with one error, or several, a line: name, two blanks or more, cause."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sdk_page() -> str:
    """The page, without the note that it is generated."""
    out = [INTRODUCTION]
    for module, name in CONTENT:
        found = _definition(module, name)
        if isinstance(found, ast.ClassDef):
            out += [f"## {name}\n", *_prose(ast.get_docstring(found) or "")]
            others = _methods(*ASYNCHRONOUS[name]) if name in ASYNCHRONOUS else {}
            for method, node in _methods(module, name).items():
                if method not in INTERNAL.get(name, ()):
                    text = ast.get_docstring(node) or ast.get_docstring(others.get(method, node)) or ""
                    out += _entry("###", f"{name}.{method}", node, _source(module), text)
        else:
            out += _entry("##", f"nvpool.{name}", found, _source(module), ast.get_docstring(found) or "")
    return "\n".join(out).rstrip() + "\n"


@cache
def _source(module: str) -> str:
    return (SDK / module).read_text()


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_source(module))


def _definition(module: str, name: str) -> ast.ClassDef | Function:
    return next(
        node for node in _tree(module).body if isinstance(node, ast.ClassDef | Function) and node.name == name
    )


def _methods(module: str, name: str) -> dict[str, Function]:
    """Public methods and properties, without the overloads for type checkers."""
    return {
        node.name: node
        for node in _definition(module, name).body
        if isinstance(node, Function)
        and not node.name.startswith("_")
        and not any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)
    }


def _entry(marks: str, title: str, node: Function, source: str, text: str) -> list[str]:
    return [f"{marks} {title}\n", f"```python\n{_signature(node, source)}\n```\n", *_prose(text)]


def _signature(node: Function, source: str) -> str:
    """On one line if it fits, else with a line for each argument."""
    result = ast.unparse(node.returns).replace("builtins.", "") if node.returns else "None"
    if any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list):
        return f"{node.name}: {result}"
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    arguments = list(_arguments(node.args, source))
    line = f"{kind} {node.name}({', '.join(arguments)}) -> {result}"
    if len(line) <= 110:
        return line
    return "\n".join(
        [f"{kind} {node.name}(", *(f"    {argument}," for argument in arguments), f") -> {result}"]
    )


def _arguments(arguments: ast.arguments, source: str) -> Iterator[str]:
    """Arguments as they are written, without self."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(plain, defaults, strict=True):
        if argument.arg != "self":
            yield _argument(argument, default, source)
    if arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default, source)


def _argument(argument: ast.arg, default: ast.expr | None, source: str) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {ast.unparse(argument.annotation).replace('builtins.', '')}"
    return text if default is None else f"{text} = {ast.get_source_segment(source, default)}"


def _prose(text: str) -> list[str]:
    """A docstring as Markdown: paragraphs, and a list for errors."""
    out = []
    for paragraph in filter(str.strip, text.split("\n\n")):
        if _ERRORS.match(paragraph):
            errors = (re.split(r" {2,}", one, maxsplit=1) for one in re.split(r"\n(?=\S)", paragraph))
            out.append("\n".join(f"* `{name}`: {_joined(cause)}" for name, cause in errors) + "\n")
        else:
            out.append(_joined(paragraph) + "\n")
    return out


def _joined(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("<", "&lt;").replace("*", "\\*")
