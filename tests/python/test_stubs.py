"""python/polyreme/_core.pyi says exactly what the extension module has: every class, function,
method and attribute with its parameters (names, kinds, and which have defaults), and nothing else.

The module's side is read from the signatures that pybind11 writes into docstrings.
"""

from __future__ import annotations

import ast
import enum
import re
from pathlib import Path
from typing import Any

import polyreme
import pytest
from polyreme import _core

# Beside the package's Python files, wherever it is installed.
STUB = Path(polyreme.__file__).parent / "_core.pyi"

# A parameter list as text: "self", "x", "y=...", "*", "*args", "**kwargs".
Parameters = tuple[str, ...]

# What every class has without being asked.
IMPLICIT = {*dir(object), "__dict__", "__module__", "__weakref__", "__annotations__"} - {"__init__"}


def split_top_level(text: str, separator: str) -> list[str]:
    """Splits at the separator where it stands outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{<":
            depth += 1
        elif character in ")]}>":
            depth -= 1
        if character == separator and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def parameters_of_text(text: str) -> Parameters:
    """Parameters of "self: X, n: int, *, name: str = 'a'"."""
    result = []
    for part in split_top_level(text, ","):
        declaration, *default = split_top_level(part, "=")
        result.append(declaration.split(":")[0].strip() + ("=..." if default else ""))
    return tuple(result)


def parameters_of_doc(name: str, doc: str | None) -> list[Parameters]:
    """One parameter list for each overload that pybind11 documents."""
    lines = (doc or "").splitlines()
    pattern = re.compile(rf"^(?:\d+\. )?{re.escape(name)}\((.*)\)(?: -> .*)?$")
    matches = [m for m in map(pattern.match, lines) if m]
    if not matches:
        pytest.fail(f"{name}: pybind11 left no signature in the docstring: {doc!r}")
    overloaded = len(lines) > 1 and lines[1].startswith("Overloaded function")
    # Without overloads only the first line is pybind11's, the rest is prose. With them, the first is a
    # placeholder (*args, **kwargs), and each overload has a line of its own.
    chosen = matches[1:] if overloaded else matches[:1]
    return sorted(parameters_of_text(m.group(1)) for m in chosen)


def parameters_of_stub(node: ast.FunctionDef) -> Parameters:
    """The same of a function in the stub."""
    a = node.args
    result = []
    positional = [*a.posonlyargs, *a.args]
    first_default = len(positional) - len(a.defaults)
    for i, argument in enumerate(positional):
        result.append(argument.arg + ("=..." if i >= first_default else ""))
        if a.posonlyargs and i == len(a.posonlyargs) - 1:
            result.append("/")
    if a.vararg:
        result.append("*" + a.vararg.arg)
    elif a.kwonlyargs:
        result.append("*")
    for argument, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        result.append(argument.arg + ("=..." if default is not None else ""))
    if a.kwarg:
        result.append("**" + a.kwarg.arg)
    return tuple(result)


def is_property(node: ast.FunctionDef) -> bool:
    return any(
        ast.unparse(d) == "property" or ast.unparse(d).endswith(".setter") for d in node.decorator_list
    )


def describe_stub(body: list[ast.stmt], prefix: str = "") -> dict[str, Any]:
    """{qualified name: "class", "value", "readonly", or a list of parameter lists}."""
    found: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[prefix + node.name] = "class"
            found.update(describe_stub(node.body, f"{prefix}{node.name}."))
        elif isinstance(node, ast.FunctionDef):
            name = prefix + node.name
            if is_property(node):
                found[name] = "value" if name in found else "readonly"
            else:
                found[name] = sorted([*found.get(name, []), parameters_of_stub(node)])
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[prefix + node.target.id] = "value"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[prefix + node.targets[0].id] = "value"
    return found


def describe_class(cls: type, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in vars(cls).items():
        if name in IMPLICIT or "pybind11" in name:
            continue
        if isinstance(value, type):
            found[prefix + name] = "class"
            found.update(describe_class(value, f"{prefix}{name}."))
        elif isinstance(value, property):
            found[prefix + name] = "value" if value.fset is not None else "readonly"
        elif callable(value) or isinstance(value, staticmethod):
            if name == "__init__" and (value.__doc__ or "").startswith("Initialize self."):
                continue  # no constructor was bound
            function = value.__func__ if isinstance(value, staticmethod) else value
            found[prefix + name] = parameters_of_doc(name, function.__doc__)
        else:
            found[prefix + name] = "value"
    return found


def describe_module(module: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name.startswith("__") and name != "__version__":
            continue
        if isinstance(value, type):
            found[name] = "class"
            # Exceptions and Python enums are made of Python's own parts; their names suffice.
            if issubclass(value, enum.Enum):
                found.update({f"{name}.{member}": "value" for member in value.__members__})
            elif not issubclass(value, BaseException):
                found.update(describe_class(value, f"{name}."))
        elif callable(value):
            found[name] = parameters_of_doc(name, value.__doc__)
        else:
            found[name] = "value"
    return found


def test_stub_and_module_agree() -> None:
    stub = describe_stub(ast.parse(STUB.read_text(encoding="utf-8")).body)
    module = describe_module(_core)
    # The stub's own imports, aliases and type variables are private to it.
    stub = {
        name: what for name, what in stub.items() if not name.split(".")[0].startswith("_") or name in module
    }

    problems = [f"{name}: in the module, not in {STUB.name}" for name in sorted(module.keys() - stub.keys())]
    problems += [f"{name}: in {STUB.name}, not in the module" for name in sorted(stub.keys() - module.keys())]
    for name in sorted(stub.keys() & module.keys()):
        if stub[name] != module[name]:
            problems.append(f"{name}: {STUB.name} has {stub[name]}, the module has {module[name]}")
    assert not problems, "\n".join(problems)


def test_every_argument_is_named() -> None:
    # pybind11 calls an argument without py::arg("name") arg0, arg1, ...
    problems = [
        f"{name}{parameters}"
        for name, what in describe_module(_core).items()
        if isinstance(what, list)
        for parameters in what
        if any(re.match(r"arg\d+", parameter) for parameter in parameters)
        # Operators are called with an operand, not with a name.
        and not re.search(r"\.__\w+__$", name)
    ]
    assert not problems, "give these arguments names with py::arg:\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("doc", "expected"),
    [
        ("f() -> None\n\nProse (f) here.\n", [()]),
        ("f(x: int, y: float = 0.5) -> int\n", [("x", "y=...")]),
        (
            "f(self: a.B, *, names: collections.abc.Sequence[str], at: str = 'a, b)') -> None",
            [("self", "*", "names", "at=...")],
        ),
        ("f(d: dict[str, int] = {}, *args, **kwargs) -> object", [("d=...", "*args", "**kwargs")]),
        (
            "f(*args, **kwargs)\nOverloaded function.\n\n1. f(x: int)\n\n2. f(x: str, n: int = 1) -> int",
            [("x",), ("x", "n=...")],
        ),
    ],
)
def test_reading_docstrings(doc: str, expected: list[Parameters]) -> None:
    assert parameters_of_doc("f", doc) == expected
