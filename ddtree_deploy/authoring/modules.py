"""What the modules and classes of a source tree define, by syntax tree: nothing is imported, nothing is run.

What the sources do not settle (``__getattr__``, names made by ``globals()``, bases from elsewhere) is *open*:
anything may be there, and no answer is "no".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ddtree_deploy.patching.functions import UnparsableError, parse

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_CLASS = re.compile(rb"^[ \t]*class[ \t]+(\w+)[ \t]*\(([^)]*)\)", re.M)
_WORD = re.compile(rb"\w+")
_GLOBAL = re.compile(rb"^[ \t]*global[ \t]|\bglobals\b", re.M)
# Names that every class has.
_OBJECT = frozenset(dir(object)) | {
    "__dict__",
    "__name__",
    "__qualname__",
    "__module__",
    "__annotations__",
    "__slots__",
}
# Bases from the standard library that add only these names to a class.
_KNOWN_BASES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("object", "ABC", "Protocol", "Generic"), frozenset()),
    **dict.fromkeys(("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"), frozenset()),
}
_ENUMS = frozenset(("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"))
_ENUM_NAMES = frozenset(("name", "value", "_value_", "_name_", "__members__", "_missing_", "_generate_next_value_"))
_PLAIN_CLASS_DECORATORS = frozenset(("dataclass", "final", "runtime_checkable", "total_ordering", "unique"))


@dataclass(frozen=True, slots=True)
class Imported:
    """A name that an import binds: a module (``name`` None), or ``name`` of a module."""

    module: str
    name: str | None


@dataclass(slots=True)
class Bindings:
    """The names of a module, class or function body: definitions, imports, or None for any other value."""

    names: dict[str, list[Definition | Imported | None]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    open: bool = False

    def add(self, name: str, what: Definition | Imported | None = None) -> None:
        self.names.setdefault(name, []).append(what)


@dataclass(frozen=True)
class Module:
    """A parsed source file and its dotted name."""

    name: str
    path: str
    tree: ast.Module
    says_global: bool = True
    broken: bool = False

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.path.endswith("/__init__.py") else self.name.rpartition(".")[0]

    @cached_property
    def bindings(self) -> Bindings:
        """Every name that the module's own code, or a ``global`` statement, binds; in whichever branch."""
        found = bindings_of(self.tree.body, self.package)
        for node in ast.walk(self.tree) if self.says_global else ():
            if isinstance(node, ast.Global):
                for name in node.names:
                    found.add(name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "globals":
                found.open = True
        found.open = found.open or self.broken or "__getattr__" in found.names
        return found


@dataclass(frozen=True)
class Class:
    """A class and the module that defines it."""

    module: Module
    node: ast.ClassDef


@dataclass(frozen=True)
class Function:
    """A function or method and the module that defines it."""

    module: Module
    node: FunctionNode


#: What a name stands for; None when the sources do not say.
Meaning = Module | Class | Function | None


class MissingError(Exception):
    """A name that is not there; ``where`` says which module lacks it (``name`` None: the module itself)."""

    def __init__(self, module: str, name: str | None) -> None:
        super().__init__(module, name)
        self.module = module
        self.name = name


class Sources:
    """A tree of Python sources below one package. ``read`` gives a file's bytes, or None where there is none."""

    def __init__(self, paths: Iterable[str], read: Callable[[str], bytes | None], package: str = "sglang") -> None:
        self.package = package
        self._paths = [path for path in paths if path.endswith(".py")]
        self._folders = {path.rpartition("/")[0] for path in self._paths}
        self._read = read
        self._modules: dict[str, Module | None] = {}
        self._texts: dict[str, bytes] | None = None
        self._heirs: dict[str, list[tuple[str, str]]] | None = None
        self._classes: dict[int, tuple[frozenset[str], bool]] = {}
        self._bodies: dict[int, Bindings] = {}
        self._own: dict[int, tuple[frozenset[str], bool]] = {}

    # -- modules -------------------------------------------------------------------------------

    def within(self, module: str) -> bool:
        """Whether the dotted name is of this package."""
        return module == self.package or module.startswith(self.package + ".")

    def at(self, path: str) -> Module | None:
        """The module of a file; None where there is none. Raises UnparsableError."""
        if path not in self._modules:
            data = self._read(path)
            self._modules[path] = (
                None if data is None else Module(_dotted(path), path, parse(data), bool(_GLOBAL.search(data)))
            )
        return self._modules[path]

    def module(self, name: str) -> Module | None:
        """The module of that dotted name. Raises MissingError; None for a folder without one."""
        base = name.replace(".", "/")
        for path in (f"{base}/__init__.py", f"{base}.py"):
            try:
                found = self.at(path)
            except UnparsableError:
                # Nobody knows what a broken file would define.
                return Module(name, path, ast.Module([], []), broken=True)
            if found is not None:
                return found
        if base in self._folders or any(path.startswith(base + "/") for path in self._folders):
            return None  # a namespace package
        raise MissingError(name, None)

    def lookup(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Meaning:
        """What ``from module import name`` gives, through re-exports. Raises MissingError when it is not there."""
        if not self.within(module) or (module, name) in seen:
            return None
        found = self.module(module)
        if found is None:
            return self._submodule(module, name)
        seen = seen | {(module, name)}
        bound = found.bindings.names.get(name)
        if bound is not None:
            return self._meaning(found, bound, seen)
        unknown = found.bindings.open
        for star in found.bindings.stars:
            if not self.within(star):
                unknown = True
                continue
            try:
                return self.lookup(star, name, seen)
            except MissingError:
                continue
        if name in ("__name__", "__file__", "__doc__", "__path__", "__package__", "__spec__", "__dict__"):
            return None
        try:
            return self._submodule(module, name)
        except MissingError:
            if unknown:
                return None
            raise MissingError(module, name) from None

    def _submodule(self, module: str, name: str) -> Meaning:
        try:
            return self.module(f"{module}.{name}")
        except MissingError:
            raise MissingError(module, name) from None

    def _meaning(
        self, module: Module, bound: list[Definition | Imported | None], seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Meaning:
        """What the only binding of a name stands for; several may each be the one in force."""
        if len(bound) != 1:
            return None
        (what,) = bound
        if isinstance(what, ast.ClassDef):
            return Class(module, what)
        if isinstance(what, Definition):
            return Function(module, what)
        if isinstance(what, Imported) and self.within(what.module):
            try:
                return self.module(what.module) if what.name is None else self.lookup(what.module, what.name, seen)
            except MissingError:
                return None  # said where that import is looked at
        return None

    def meaning(self, module: Module, expression: ast.expr, local: Bindings | None = None) -> Meaning:
        """What a dotted expression stands for in a module (``local``: names bound nearer). Raises MissingError."""
        if isinstance(expression, ast.Name):
            for bindings in (local, module.bindings):
                if bindings is not None and expression.id in bindings.names:
                    return self._meaning(module, bindings.names[expression.id])
            return None
        if isinstance(expression, ast.Attribute):
            owner = self.meaning(module, expression.value, local)
            if isinstance(owner, Module):
                return self.lookup(owner.name, expression.attr)
            if isinstance(owner, Class):
                method = self.method(owner, expression.attr)
                return method if method is not None and _is_static(method.node) else None
        return None

    # -- classes -------------------------------------------------------------------------------

    def bases(self, item: Class) -> tuple[list[Class], frozenset[str], bool]:
        """A class's bases in the tree, the names that known ones from elsewhere add, and whether others are open."""
        found: list[Class] = []
        names: set[str] = set()
        unknown = any(key.arg != "metaclass" or last_name(key.value) != "ABCMeta" for key in item.node.keywords)
        for base in item.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            try:
                meaning = self.meaning(item.module, expression)
            except MissingError:
                meaning = None
            last = expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")
            if isinstance(meaning, Class) and meaning.node is not item.node:
                found.append(meaning)
            elif last in _KNOWN_BASES and meaning is None:
                names |= _ENUM_NAMES if last in _ENUMS else set()
            else:
                unknown = True
        return found, frozenset(names), unknown

    def body(self, item: Class) -> Bindings:
        """What the class's own body binds."""
        key = id(item.node)
        if key not in self._bodies:
            self._bodies[key] = bindings_of(item.node.body, item.module.package)
        return self._bodies[key]

    def on_instances(self, item: Class) -> tuple[frozenset[str], bool]:
        """What the class's own methods bind on instances, and whether they may bind more."""
        key = id(item.node)
        if key not in self._own:
            self._own[key] = _own_attributes(item.node)
        return self._own[key]

    def attributes(self, item: Class) -> tuple[frozenset[str], bool]:
        """The attributes that a class, its bases and their methods bind, and whether there may be others."""
        key = id(item.node)
        if key not in self._classes:
            self._classes[key] = (frozenset(), True)  # a cycle of bases is open
            own, unknown = self.on_instances(item)
            names = {*own, *self.body(item).names}
            bases, added, elsewhere = self.bases(item)
            names |= added
            unknown = unknown or elsewhere
            for base in bases:
                more, uncertain = self.attributes(base)
                names |= more
                unknown = unknown or uncertain
            self._classes[key] = (frozenset(names), unknown)
        return self._classes[key]

    def method(self, item: Class, name: str) -> Function | None:
        """The method that an instance has under that name, where the tree settles it."""
        return self._method(item, name, frozenset())[0]

    def _method(self, item: Class, name: str, seen: frozenset[int]) -> tuple[Function | None, bool]:
        if id(item.node) in seen:
            return None, True
        bound = self.body(item).names.get(name)
        if bound is not None:
            # What a method puts on the instance under that name goes before the class's own.
            single = bound[0] if len(bound) == 1 and name not in self.on_instances(item)[0] else None
            return (Function(item.module, single) if isinstance(single, FunctionNode) else None), True
        bases, _, unknown = self.bases(item)
        for base in bases:
            found, settled = self._method(base, name, seen | {id(item.node)})
            if settled:
                return found, True
        return None, unknown

    def has_attribute(self, item: Class, name: str) -> bool:
        """Whether instances of a class may have an attribute: its own or a base's; a subclass's, for what is mixed
        in; or one that some code of the tree puts on some object from outside.
        """
        names, unknown = self.attributes(item)
        if unknown or name in names or name in _OBJECT:
            return True
        return self._of_subclass(item.node.name, name, set()) or self._assigned(name)

    def has_subclasses(self, item: Class) -> bool:
        """Whether another class of the tree names it as a base."""
        return any(self._subclasses(item.node.name))

    def _subclasses(self, class_name: str) -> Iterator[tuple[str, str]]:
        """(path, name) of the classes that name one as a base, as far as the text shows."""
        if self._heirs is None:
            self._heirs = {}
            for path, text in self._all_texts().items():
                for match in _CLASS.finditer(text):
                    for base in set(_WORD.findall(match[2])):
                        self._heirs.setdefault(base.decode(), []).append((path, match[1].decode()))
        yield from self._heirs.get(class_name, ())

    def _of_subclass(self, class_name: str, name: str, seen: set[str]) -> bool:
        if class_name in seen:
            return False
        seen.add(class_name)
        for path, subclass in self._subclasses(class_name):
            found = self._class_at(path, subclass)
            if found is None:
                continue
            names, unknown = self.attributes(found)
            if unknown or name in names or self._of_subclass(subclass, name, seen):
                return True
        return False

    def _class_at(self, path: str, name: str) -> Class | None:
        try:
            module = self.at(path)
        except UnparsableError:
            return None
        if module is None:
            return None
        nodes = (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef) and node.name == name)
        return next((Class(module, node) for node in nodes), None)

    def _assigned(self, name: str) -> bool:
        """Whether any code of the tree assigns an attribute of that name to anything."""
        word = name.encode()
        spelled = (b"." + word, b'"' + word + b'"', b"'" + word + b"'")
        for path, text in self._all_texts().items():
            if not any(spelling in text for spelling in spelled):
                continue
            try:
                module = self.at(path)
            except UnparsableError:
                continue
            if module is not None and any(_assigns(node, name) for node in ast.walk(module.tree)):
                return True
        return False

    def _all_texts(self) -> Mapping[str, bytes]:
        if self._texts is None:
            self._texts = {path: data for path in self._paths if (data := self._read(path)) is not None}
        return self._texts


def bindings_of(body: Iterable[ast.AST], package: str) -> Bindings:
    """The names that nodes bind where they stand: branches are looked into, functions and classes are not."""
    found = Bindings()
    for node in _own_nodes(body):
        if isinstance(node, Definition):
            found.add(node.name, node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    found.add(alias.asname, Imported(alias.name, None))
                else:
                    found.add(alias.name.partition(".")[0], Imported(alias.name.partition(".")[0], None))
        elif isinstance(node, ast.ImportFrom):
            module = import_source(node, package)
            for alias in node.names:
                if alias.name == "*":
                    found.stars.append(module)
                else:
                    found.add(alias.asname or alias.name, Imported(module, alias.name))
        else:
            for name in _bound_by(node):
                found.add(name)
    # `import a.b` and `import a.c` bind the same a.
    for name, bound in found.names.items():
        found.names[name] = list(dict.fromkeys(bound))
    return found


def import_source(node: ast.ImportFrom, package: str) -> str:
    """The dotted name that a ``from`` import names, made absolute."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - (node.level - 1)]
    return ".".join([*base, node.module] if node.module else base)


def _own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every node but what is inside of functions, classes, lambdas; a comprehension's own targets are given too."""
    stack = list(body)[::-1]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, Definition):
            stack += [*node.decorator_list][::-1]
        elif not isinstance(node, ast.Lambda):
            stack += [*ast.iter_child_nodes(node)][::-1]


def _bound_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest


def _own_attributes(node: ast.ClassDef) -> tuple[frozenset[str], bool]:
    """What a class's methods bind on its instances, and whether something may bind more."""
    names: set[str] = set()
    decorators = (item.func if isinstance(item, ast.Call) else item for item in node.decorator_list)
    unknown = any(last_name(item) not in _PLAIN_CLASS_DECORATORS for item in decorators)
    for method in _own_nodes(node.body):
        if not isinstance(method, FunctionNode) or not method.args.args:
            continue
        unknown = unknown or method.name in ("__getattr__", "__getattribute__")
        own = method.args.args[0].arg
        for inner in ast.walk(method):
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == own:
                if isinstance(inner.ctx, ast.Store):
                    names.add(inner.attr)
                elif inner.attr == "__dict__":
                    unknown = True
            elif isinstance(inner, ast.Call) and last_name(inner.func) in ("setattr", "vars") and inner.args:
                first, *rest = inner.args
                if isinstance(first, ast.Name) and first.id == own:
                    text = rest[0].value if rest and isinstance(rest[0], ast.Constant) else None
                    names.add(str(text))
                    unknown = unknown or text is None
    return frozenset(names), unknown


def _assigns(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == name and isinstance(node.ctx, ast.Store)
    if isinstance(node, ast.Call) and last_name(node.func) == "setattr" and len(node.args) > 1:
        return isinstance(node.args[1], ast.Constant) and node.args[1].value == name
    return False


def last_name(expression: ast.expr) -> str:
    """``c`` of ``a.b.c`` or of ``c``; empty for anything else."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def _is_static(node: FunctionNode) -> bool:
    return any(last_name(item) == "staticmethod" for item in node.decorator_list)


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
