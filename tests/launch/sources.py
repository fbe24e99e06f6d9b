"""Functions of published engines, cut out of their modules by syntax tree and run on stand-ins: no torch needed."""

from __future__ import annotations

import ast
import math
import sys
import types
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


def cut(source: bytes, *names: str) -> dict[str, ast.stmt]:
    """The named classes, functions (of a class too) and assignments of a module."""
    found: dict[str, ast.stmt] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            found.setdefault(node.name, node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            found.setdefault(node.targets[0].id, node)
    assert set(names) == set(found), set(names) - set(found)
    return found


def run(nodes: Mapping[str, ast.stmt], provided: Mapping[str, Any]) -> dict[str, Any]:
    """What the statements define, with the provided names in sight."""
    future = ast.parse("from __future__ import annotations").body
    module = types.ModuleType("engine_cut")
    module.__dict__.update(provided)
    # dataclasses look their module up while they are being made.
    sys.modules[module.__name__] = module
    try:
        exec(compile(ast.Module([*future, *nodes.values()], []), "<engine>", "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return {name: getattr(module, name) for name in nodes}


#: numpy, as far as the state's size needs it.
NUMPY = SimpleNamespace(prod=math.prod, sum=sum)


class Context(SimpleNamespace):
    """The engine's configuration bags of later versions: one object is all of them."""

    def override(self, _why: str, **values: Any) -> None:
        self.__dict__.update(values)


def float_dtype(size: int) -> SimpleNamespace:
    """A torch dtype of so many bytes."""
    return SimpleNamespace(itemsize=size)
