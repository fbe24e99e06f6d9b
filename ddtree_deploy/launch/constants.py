"""Values of constant expressions in the engine's sources, read from syntax trees; nothing is imported or run.

Only what argument declarations are made of is understood: literals, names bound once at module level (followed
through ``from ... import``), class attributes, sums of lists, ``dict.keys()`` and the usual containers. Everything
else is :data:`UNKNOWN`, never a guess.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Reads a file by its path relative to the site, such as ``sglang/srt/server_args.py``; None where there is none.
Read = Callable[[str], bytes | None]

MAX_DEPTH = 40
#: Nodes looked at for one value: lists that are defined by doubling each other must end, too.
MAX_STEPS = 20_000


class _Unknown:
    """The value of an expression that cannot be told without running it."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


class _TooLong(Exception):
    """An evaluation has looked at too many nodes."""


@dataclass(frozen=True)
class ClassNode:
    """A class of the engine: its syntax tree and the module whose names it sees."""

    node: ast.ClassDef
    module: Module


@dataclass(frozen=True)
class FunctionNode:
    """A function of the engine: its syntax tree and the module whose names it sees."""

    node: ast.FunctionDef
    module: Module


@dataclass(frozen=True)
class _Import:
    module: str
    name: str


_Binding = ast.expr | ast.ClassDef | ast.FunctionDef | _Import
Scope = Mapping[str, "_Binding"]


@dataclass
class Module:
    """One source file and what its top level binds."""

    path: str
    sources: Sources
    names: dict[str, _Binding] = field(default_factory=dict)

    def value(self, node: ast.expr, scope: Scope | None = None) -> Any:
        """The value of an expression, with ``scope`` before the module's names; UNKNOWN where it cannot be told."""
        return self.sources.bounded(lambda: _Evaluation(self, scope or {}).value(node))

    def lookup(self, name: str) -> Any:
        """What a top-level name is: a value, :class:`ClassNode`, :class:`FunctionNode` or UNKNOWN."""
        return self.sources.bounded(lambda: _Evaluation(self, {}).name(name))


class Sources:
    """The engine's modules, parsed when they are first asked for."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._modules: dict[str, Module | None] = {}
        self._steps = 0

    def bounded(self, evaluate: Callable[[], Any]) -> Any:
        """What ``evaluate`` returns, or UNKNOWN where it takes too long or goes too deep."""
        self._steps = 0
        try:
            return evaluate()
        except (RecursionError, _TooLong):
            return UNKNOWN

    def step(self) -> None:
        """Count a node that is looked at."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooLong

    def module(self, path: str) -> Module | None:
        """The module at a path of the site; None where there is none, or where it is not Python."""
        if path not in self._modules:
            data = self._read(path)
            self._modules[path] = None if data is None else self._parse(path, data)
        return self._modules[path]

    def dotted(self, name: str) -> Module | None:
        """The module of a dotted name."""
        base = name.replace(".", "/")
        return self.module(f"{base}.py") or self.module(f"{base}/__init__.py")

    def _parse(self, path: str, data: bytes) -> Module | None:
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        module = Module(path, self)
        bind(tree.body, module.names)
        return module


def bind(body: list[ast.stmt], names: dict[str, Any]) -> None:
    """Add to ``names`` what the statements bind, those inside ``if`` and ``try`` too.

    A class stays the class where its name is bound again: later versions rebuild ServerArgs from its declaration.
    """

    def assign(target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and not isinstance(names.get(target.id), ast.ClassDef):
            names[target.id] = value

    for statement in body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                assign(target, statement.value)
        elif isinstance(statement, ast.AnnAssign):
            if statement.value is not None:
                assign(statement.target, statement.value)
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
            names[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                names[alias.asname or alias.name] = _Import(statement.module, alias.name)
        elif isinstance(statement, ast.If | ast.Try):
            bind(statement.body, names)
            bind(statement.orelse, names)


class _Evaluation:
    def __init__(self, module: Module, scope: Scope, depth: int = 0) -> None:
        self._module = module
        self._scope = scope
        self._depth = depth

    def value(self, node: ast.expr | None) -> Any:
        self._module.sources.step()
        if node is None or self._depth > MAX_DEPTH:
            return UNKNOWN
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        return UNKNOWN if method is None else method(node)

    def _deeper(self, module: Module, scope: Scope) -> _Evaluation:
        return _Evaluation(module, scope, self._depth + 1)

    def name(self, name: str) -> Any:
        if name in self._scope:
            # A name of a scope may be bound to an expression that uses itself; it then sees the outer one.
            outer = {key: bound for key, bound in self._scope.items() if key != name}
            return self._bound(self._scope[name], outer)
        return self._bound(self._module.names[name], {}) if name in self._module.names else UNKNOWN

    def _bound(self, bound: _Binding, scope: Scope) -> Any:
        if isinstance(bound, ast.ClassDef):
            return ClassNode(bound, self._module)
        if isinstance(bound, ast.FunctionDef):
            return FunctionNode(bound, self._module)
        if isinstance(bound, _Import):
            module = self._module.sources.dotted(bound.module)
            if module is None or self._depth > MAX_DEPTH:
                return UNKNOWN
            return self._deeper(module, {}).name(bound.name)
        return self._deeper(self._module, scope).value(bound)

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        return self.name(node.id)

    def _items(self, nodes: list[ast.expr]) -> Any:
        items: list[Any] = []
        for node in nodes:
            value = self.value(node.value if isinstance(node, ast.Starred) else node)
            if value is UNKNOWN:
                return UNKNOWN
            if isinstance(node, ast.Starred):
                if not isinstance(value, list | tuple | dict):
                    return UNKNOWN
                items += value
            else:
                items.append(value)
        return items

    def _list(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        """Sets too become lists, in source order: no more than membership is asked of them."""
        return self._items(node.elts)

    _tuple = _set = _list

    def _dict(self, node: ast.Dict) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                merged = self.value(value)
                if not isinstance(merged, dict):
                    return UNKNOWN
                found |= merged
                continue
            name = self.value(key)
            if not isinstance(name, str | int):
                return UNKNOWN
            found[name] = self.value(value)
        return found

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        return UNKNOWN

    def _binop(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Add | ast.BitOr) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Add | ast.Mult) and isinstance(left, int | float) and isinstance(right, int | float):
            return left + right if isinstance(node.op, ast.Add) else left * right
        return UNKNOWN

    def _subscript(self, node: ast.Subscript) -> Any:
        value, index = self.value(node.value), self.value(node.slice)
        try:
            return value[index] if isinstance(value, list | dict) else UNKNOWN
        except (LookupError, TypeError):
            return UNKNOWN

    def _attribute(self, node: ast.Attribute) -> Any:
        owner = self.value(node.value)
        if not isinstance(owner, ClassNode):
            return UNKNOWN
        names: dict[str, Any] = {}
        bind(owner.node.body, names)
        if node.attr not in names:
            return UNKNOWN
        return self._deeper(owner.module, names).name(node.attr)

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "keys" and not node.args:
            value = self.value(node.func.value)
            return list(value) if isinstance(value, dict) else UNKNOWN
        if not isinstance(node.func, ast.Name) or node.keywords:
            return UNKNOWN
        if node.func.id in ("list", "set", "tuple", "sorted", "frozenset") and len(node.args) == 1:
            value = self.value(node.args[0])
            return list(value) if isinstance(value, list | dict) else UNKNOWN
        function = self.name(node.func.id)
        if isinstance(function, FunctionNode) and not node.args:
            return self._returned(function)
        return UNKNOWN

    def _returned(self, function: FunctionNode) -> Any:
        """What the last statement of a function without arguments returns."""
        last = function.node.body[-1]
        if not isinstance(last, ast.Return) or last.value is None or self._depth > MAX_DEPTH:
            return UNKNOWN
        names: dict[str, Any] = {}
        bind(function.node.body, names)
        return self._deeper(function.module, names).value(last.value)
