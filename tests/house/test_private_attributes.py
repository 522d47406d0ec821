"""Attributes that begin with `_` belong to their object: other code uses public names.

A class may use its own private names on another instance. Named tuples, modules of the standard library and the
protocol between tasks and futures have public names that begin with `_`. Tests may replace a private method to break
a guarantee (tests/model/test_broken_guarantees.py); their number only shrinks.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TESTS_MAX = 18
"""Uses in tests. Lower it when a use goes; a test that needs a new one needs a public name instead."""

PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_field_defaults", "_asyncio_future_blocking"}
BY_NAME = {"getattr", "setattr", "delattr", "hasattr", "object"}
"""Functions, and methods of monkeypatch and of mock.patch, that take the name of an attribute."""
PRIVATE_NAME = re.compile(r"(?:[\w.]*\.)?_[A-Za-z]\w*")
IN_CYTHON = re.compile(r"[\w.]*[\w)\]]\._[a-z]\w*")


def own_names(cls):
    """Names that the class itself defines: methods, class attributes, slots and attributes of self."""
    found = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls"):
            found.add(node.attr)
    for node in cls.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found.update(target.id for target in targets if isinstance(target, ast.Name))
        if any(getattr(target, "id", "") == "__slots__" for target in targets):
            found.update(
                constant.value for constant in ast.walk(node.value) if isinstance(constant, ast.Constant)
            )
    return found


def imported_modules(tree):
    return {
        alias.asname or alias.name.split(".")[0]: alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }


def private_uses(source):
    """(line, text) of each use of a private attribute of another object, or import of a private name."""
    tree = ast.parse(source)
    modules, found = imported_modules(tree), []

    def is_own(node, names):
        owner = node.value
        return (
            node.attr in names
            or getattr(owner, "id", "") in ("self", "cls")
            or modules.get(getattr(owner, "id", "")) in sys.stdlib_module_names
            or (isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super")
        )

    def visit(node, names):
        if isinstance(node, ast.ClassDef):
            names = own_names(node)
        elif isinstance(node, ast.Attribute):
            is_private = node.attr.startswith("_") and not node.attr.endswith("__")
            if is_private and node.attr not in PUBLIC and not is_own(node, names):
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Call):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            is_ours = node.args and getattr(node.args[0], "id", "") in ("self", "cls", "sys")
            for argument in node.args[:2] if called in BY_NAME and not is_ours else ():
                name = getattr(argument, "value", None) if isinstance(argument, ast.Constant) else None
                if isinstance(name, str) and PRIVATE_NAME.fullmatch(name):
                    found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nvpool"):
            folder = ROOT.joinpath(*node.module.split("."))
            found.extend(
                (node.lineno, f"from {node.module} import {alias.name}")
                for alias in node.names
                if alias.name.startswith("_") and not (folder / f"{alias.name}.pyx").exists()
            )
        for child in ast.iter_child_nodes(node):
            visit(child, names)

    visit(tree, frozenset())
    return found


def private_uses_in_cython(source):
    """The same for a `.pyx` or `.pxd` file, by pattern: Python cannot parse it."""
    source = re.sub(r'"""(?:.|\n)*?"""', lambda text: "\n" * text[0].count("\n"), source)
    found = []
    for number, line in enumerate(source.split("\n"), 1):
        code = re.sub(r'"[^"]*"', '""', line).split("#")[0]
        if not re.match(r"\s*(?:from|import|cimport)\b", code):
            uses = IN_CYTHON.findall(code)
            found += [(number, use) for use in uses if use.rpartition(".")[0] not in ("self", "cls")]
    return found


def uses_below(folder, pattern, finder):
    return [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / folder).rglob(pattern))
        if "v1" not in path.parts
        for line, text in finder(path.read_text())
    ]


def test_package_uses_no_private_attribute_of_another_object():
    found = [
        use for folder in ("nvpool", "bench", "tools") for use in uses_below(folder, "*.py", private_uses)
    ]
    found += uses_below("nvpool", "*.p[yx][xd]", private_uses_in_cython)
    assert not found, "\n".join(found)


def test_private_attributes_in_tests_only_get_fewer():
    found = uses_below("tests", "*.py", private_uses)
    assert len(found) == TESTS_MAX, "\n".join([f"{len(found)} uses, TESTS_MAX is {TESTS_MAX}:", *found])


def test_uses_of_private_attributes_are_found():
    source = """
import os
from nvpool.client import _other
class A:
    def __init__(self, other, pair): self._mine = other._theirs; pair._replace(x=1); super()._begin()
    def __eq__(self, other): return self._mine == other._mine
def f(a, monkeypatch): os._exit(0); a.b._c = 1; a.__dict__; monkeypatch.setattr(a, "_d", 1); a.get("_e", 1)
"""
    assert [text for _, text in private_uses(source)] == [
        "from nvpool.client import _other",
        "other._theirs",
        "a.b._c",
        "monkeypatch.setattr(a, '_d', 1)",
    ]
    source = '''
from a._b cimport c
cdef class A:
    """Uses b._nothing."""
    def f(self, b): self._x = <dict?>b._live  # b._no
        self._y._z(self.k._l, f(1)._m)
'''
    assert [text for _, text in private_uses_in_cython(source)] == [
        "b._live",
        "self._y._z",
        "self.k._l",
        "1)._m",
    ]
