"""Whether what given lines of a source use exists: imports, names, attributes, methods, arguments. By syntax tree.

Only what the tree settles is judged: a symbol is reported when nothing in the sources can provide it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from ddtree_deploy.authoring.modules import (
    Bindings,
    Class,
    Definition,
    Function,
    FunctionNode,
    Meaning,
    MissingError,
    Module,
    Sources,
    bindings_of,
    import_source,
    last_name,
)
from ddtree_deploy.authoring.signatures import Signature, misfit, signature_of
from ddtree_deploy.patching.functions import UnparsableError

_BUILTINS = frozenset(dir(builtins)) | {"__file__", "__path__", "__class__", "__builtins__", "__annotations__"}
_OF_CLASSES = frozenset(dir(type)) | {"__dataclass_fields__", "__slots__"}
_PROBES = ("hasattr", "getattr", "setattr", "delattr")
_TOLERANT = frozenset(("ImportError", "ModuleNotFoundError", "Exception", "BaseException", "AttributeError"))


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A symbol that is not there. ``kind``: ``syntax``, ``import``, ``name``, ``attribute`` or ``argument``."""

    path: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def check_symbols(sources: Sources, lines: Mapping[str, Collection[int] | None]) -> list[Finding]:
    """What the given lines (path -> numbers from 1; None: all) use that nothing in the tree provides."""
    findings: set[Finding] = set()
    for path, wanted in lines.items():
        try:
            module = sources.at(path)
        except UnparsableError as error:
            findings.add(Finding(path, 0, "syntax", f"does not parse: {error}"))
            continue
        if module is not None:
            findings.update(_Checker(sources, module, wanted).run())
    return sorted(findings)


@dataclass
class _Scope:
    """A function being looked into: the names that it binds, and the classes that some of them are known to hold."""

    bindings: Bindings
    types: dict[str, Class] = field(default_factory=dict)


class _Checker(ast.NodeVisitor):
    def __init__(self, sources: Sources, module: Module, wanted: Collection[int] | None) -> None:
        self.sources = sources
        self.module = module
        self.wanted = None if wanted is None else sorted(wanted)
        self.scopes: list[_Scope] = []
        self.classes: list[Class] = []
        self.tolerant = 0
        self.findings: list[Finding] = []

    @cached_property
    def probed(self) -> frozenset[object]:
        """The attributes that the file asks for by name (``hasattr`` and the like): these may be missing."""
        calls = (node for node in ast.walk(self.module.tree) if isinstance(node, ast.Call))
        return frozenset(
            argument.value
            for call in calls
            if last_name(call.func) in _PROBES
            for argument in call.args
            if isinstance(argument, ast.Constant)
        )

    def run(self) -> list[Finding]:
        self.visit_all(self.module.tree.body)
        return self.findings

    # -- where we are --------------------------------------------------------------------------

    def touches(self, first: int, last: int) -> bool:
        return self.wanted is None or any(first <= line <= last for line in self.wanted)

    def report(self, node: ast.expr | ast.stmt | ast.alias, kind: str, text: str, *, whole: bool = False) -> None:
        if isinstance(node, ast.Attribute) and node.attr in self.probed:
            return
        last = node.end_lineno or node.lineno
        first = node.lineno if whole else last
        if self.touches(first, last):
            self.findings.append(Finding(self.module.path, first, kind, text))

    def visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            decorators = node.decorator_list if isinstance(node, Definition) else []
            first = min([node.lineno, *(item.lineno for item in decorators)])
            if not self.touches(first, node.end_lineno or node.lineno):
                return
        super().visit(node)

    @contextmanager
    def inside(self, scope: _Scope) -> Iterator[None]:
        self.scopes.append(scope)
        yield
        self.scopes.pop()

    # -- scopes --------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_all([*node.decorator_list, *node.bases, *node.keywords])
        # A class body sees its own names; its methods do not, which is not told apart here.
        self.classes.append(Class(self.module, node))
        with self.inside(_Scope(bindings_of([*node.body, *_type_parameters(node)], self.module.package))):
            self.visit_all(node.body)
        self.classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.function(node)

    def function(self, node: FunctionNode) -> None:
        self.visit_all([*node.decorator_list, *node.args.defaults, *node.args.kw_defaults])
        scope = _Scope(bindings_of([*node.body, *_type_parameters(node)], self.module.package))
        rebound = set(scope.bindings.names)
        with self.inside(scope):
            self.visit_all([node.returns, *(argument.annotation for argument in _arguments(node.args))])
            for argument in _arguments(node.args):
                known = self.annotated(argument.annotation)
                if known is not None and argument.arg not in rebound:
                    scope.types[argument.arg] = known
                scope.bindings.add(argument.arg)
            own = self.own_argument(node)
            if own is not None and own not in rebound:
                scope.types.setdefault(own, self.classes[-1])
            scope.types.update(self.assigned(node, scope))
            self.visit_all(node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit_all([*node.args.defaults, *node.args.kw_defaults])
        bindings = bindings_of([node.body], self.module.package)
        for argument in _arguments(node.args):
            bindings.add(argument.arg)
        with self.inside(_Scope(bindings)):
            self.visit(node.body)

    def own_argument(self, node: FunctionNode) -> str | None:
        """The name of ``self`` or ``cls`` in a method."""
        arguments = [*node.args.posonlyargs, *node.args.args]
        static = any(last_name(item) == "staticmethod" for item in node.decorator_list)
        if not self.classes or static or not arguments or node not in self.classes[-1].node.body:
            return None
        return arguments[0].arg

    def assigned(self, node: FunctionNode, scope: _Scope) -> dict[str, Class]:
        """Local names that are bound once, to a new object of a class of the tree."""
        found: dict[str, Class] = {}
        stores: dict[str, int] = {}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                stores[inner.id] = stores.get(inner.id, 0) + 1
            if isinstance(inner, ast.Assign) and len(inner.targets) == 1 and isinstance(inner.targets[0], ast.Name):
                if isinstance(inner.value, ast.Call):
                    meaning = self.meaning(inner.value.func)
                    if isinstance(meaning, Class):
                        found[inner.targets[0].id] = meaning
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                known = self.annotated(inner.annotation)
                if known is not None:
                    found[inner.target.id] = known
        return {name: known for name, known in found.items() if stores.get(name) == 1 and name not in scope.types}

    def annotated(self, annotation: ast.expr | None) -> Class | None:
        """The class of the tree that an annotation names; ``X | None`` and ``Optional[X]`` name X."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except (SyntaxError, ValueError):
                return None
        if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
            sides = [side for side in (annotation.left, annotation.right) if not _is_none(side)]
            return self.annotated(sides[0]) if len(sides) == 1 else None
        if isinstance(annotation, ast.Subscript) and last_name(annotation.value) == "Optional":
            return self.annotated(annotation.slice)
        meaning = self.meaning(annotation) if isinstance(annotation, ast.Name | ast.Attribute) else None
        return meaning if isinstance(meaning, Class) else None

    # -- what names stand for ------------------------------------------------------------------

    def meaning(self, expression: ast.expr) -> Meaning:
        """As :meth:`Sources.meaning`, in the scopes that we are in; None for what is missing too."""
        root = expression
        while isinstance(root, ast.Attribute):
            root = root.value
        local = None
        if isinstance(root, ast.Name):
            scopes = (scope.bindings for scope in reversed(self.scopes))
            local = next((bindings for bindings in scopes if root.id in bindings.names), None)
        try:
            return self.sources.meaning(self.module, expression, local)
        except MissingError:
            return None

    def type_of(self, expression: ast.expr) -> Class | None:
        """The class of what a plain name holds."""
        if isinstance(expression, ast.Name):
            for scope in reversed(self.scopes):
                if expression.id in scope.types:
                    return scope.types[expression.id]
                if expression.id in scope.bindings.names:
                    return None
        return None

    # -- imports -------------------------------------------------------------------------------

    def visit_Try(self, node: ast.Try) -> None:
        caught = {name for handler in node.handlers for name in _caught(handler)}
        tolerant = bool(caught & _TOLERANT)
        self.tolerant += tolerant
        self.visit_all(node.body)
        self.tolerant -= tolerant
        self.visit_all([*node.handlers, *node.orelse, *node.finalbody])

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if self.sources.within(alias.name) and not self.tolerant:
                try:
                    self.sources.module(alias.name)
                except MissingError as missing:
                    self.report(alias, "import", f"there is no module {missing.module}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = import_source(node, self.module.package)
        if not self.sources.within(source) or self.tolerant:
            return
        try:
            self.sources.module(source)
        except MissingError as missing:
            self.report(node, "import", f"there is no module {missing.module}", whole=True)
            return
        for alias in node.names:
            if alias.name == "*":
                continue
            try:
                self.sources.lookup(source, alias.name)
            except MissingError as missing:
                self.report(alias, "import", f"{missing.module} has no {missing.name or 'such module'}")

    # -- names and attributes ------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> None:
        name = node.id
        if not isinstance(node.ctx, ast.Load) or name in _BUILTINS:
            return
        if any(name in scope.bindings.names for scope in self.scopes):
            return
        try:
            self.sources.lookup(self.module.name, name)
        except MissingError:
            self.report(node, "name", f"nothing defines {name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        if not isinstance(node.ctx, ast.Load) or self.tolerant:
            return
        owner = self.meaning(node.value)
        if isinstance(owner, Module):
            try:
                self.sources.lookup(owner.name, node.attr)
            except MissingError:
                self.report(node, "attribute", f"{owner.name} has no {node.attr}")
            return
        known = owner if isinstance(owner, Class) else self.type_of(node.value)
        if known is None and _is_super(node.value) and self.classes:
            self.inherited(node, self.classes[-1])
        if known is None or (isinstance(owner, Class) and node.attr in _OF_CLASSES):
            return
        if not self.sources.has_attribute(known, node.attr):
            self.report(node, "attribute", f"{known.node.name} has no {node.attr}")

    def inherited(self, node: ast.Attribute, item: Class) -> None:
        bases, _, unknown = self.sources.bases(item)
        found = [self.sources.attributes(base) for base in bases]
        settled = not unknown and not any(open_ for _, open_ in found)
        if settled and not any(node.attr in names for names, _ in found) and not hasattr(object, node.attr):
            self.report(node, "attribute", f"no base of {item.node.name} has {node.attr}")

    # -- calls ---------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        signature, what = self.callee(node.func)
        reason = misfit(node, signature) if signature is not None else None
        if reason is not None:
            self.report(node, "argument", f"{what}: {reason}", whole=True)

    def callee(self, called: ast.expr) -> tuple[Signature | None, str]:
        found: Function | None = None
        if isinstance(called, ast.Attribute):
            known = self.type_of(called.value)
            if known is not None:
                if self.is_own(called.value) or not self.sources.has_subclasses(known):
                    found = self.sources.method(known, called.attr)
            elif _is_super(called.value) and self.classes:
                bases = self.sources.bases(self.classes[-1])
                if len(bases[0]) == 1 and not bases[2]:
                    found = self.sources.method(bases[0][0], called.attr)
            if found is not None:
                return signature_of(self.sources, found, bound=True), f"{last_name(called)}()"
        meaning = self.meaning(called)
        if isinstance(meaning, Class | Function):
            return signature_of(self.sources, meaning), f"{last_name(called)}()"
        return None, ""

    def is_own(self, expression: ast.expr) -> bool:
        """Whether a typed name holds an object of the very class that we are in."""
        known = self.type_of(expression)
        return bool(self.classes) and known is not None and known.node is self.classes[-1].node


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]


def _type_parameters(node: Definition) -> list[ast.stmt]:
    """The names of PEP 695 parameters, as assignments."""
    names = [parameter.name for parameter in getattr(node, "type_params", ())]
    return [ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)) for name in names]


def _caught(handler: ast.ExceptHandler) -> Iterator[str]:
    if handler.type is None:
        yield "BaseException"
    elif isinstance(handler.type, ast.Tuple):
        yield from (last_name(item) for item in handler.type.elts)
    else:
        yield last_name(handler.type)


def _is_none(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Constant) and expression.value is None


def _is_super(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Call) and last_name(expression.func) == "super" and not expression.args
