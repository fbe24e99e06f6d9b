"""The flags that an installed engine takes, read from its sources by syntax tree.

Up to 0.5.13 ``ServerArgs.add_cli_args`` registers each flag by hand; from 0.5.14 most are derived from annotated
fields, which from 0.5.20 live in ``arg_groups/fields``. All three are read here by the rules that the engine itself
applies, so that what a host's parser accepts is known without its interpreter, torch or a GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ddtree_deploy.errors import DeployError
from ddtree_deploy.launch.constants import UNKNOWN, ClassNode, FunctionNode, Module, Read, Sources, bind

SERVER_ARGS = "sglang/srt/server_args.py"
NONE, ONE, OPTIONAL, MANY, ANY = "none", "one", "optional", "many", "any"  # how many values a flag takes

_NARGS = {"?": OPTIONAL, "+": MANY, "*": ANY, 0: NONE, 1: ONE}
_SCALARS = ("int", "float", "str")
_SWITCHES = ("store_true", "store_false", "store_const", "count", "help", "version")
_DEPRECATED_SWITCHES = ("DeprecatedAction", "DeprecatedStoreTrueAction", "DeprecatedStoreConstAction")


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line flag of the engine.

    ``takes`` is one of the constants above; ``type`` is "int", "float" or "str", None where a converter of the
    engine's own reads the value; ``choices`` is None where any value goes or where they cannot be told.
    ``successor`` names what a deprecated flag says to use instead, as the engine words it.
    """

    names: tuple[str, ...]
    takes: str
    type: str | None
    choices: tuple[str, ...] | None
    default: Any
    required: bool
    deprecated: bool = False
    successor: str | None = None

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


@dataclass(frozen=True)
class EngineParser:
    """Every flag of one installed engine. ``unread`` tells what of the declarations could not be followed."""

    flags: tuple[Flag, ...]
    unread: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, Flag]:
        """Each full name, aliases too."""
        return {name: flag for flag in self.flags for name in flag.names}

    def abbreviated(self, name: str) -> tuple[str, ...]:
        """The full names that ``name``, which is none itself, would abbreviate; more than one is an error."""
        return tuple(full for full in self.by_name if full.startswith(name))

    @property
    def has_ddtree(self) -> bool:
        """Whether the tree's own parser offers DDTREE: its flags, and the algorithm where choices are closed."""
        algorithm = self.by_name.get("--speculative-algorithm")
        offered = algorithm is not None and (algorithm.choices is None or "DDTREE" in algorithm.choices)
        return offered and "--speculative-ddtree-budget" in self.by_name


def read_parser(read: Read) -> EngineParser:
    """The parser of the engine whose files ``read`` gives. Raises :class:`DeployError` ``DD610``."""
    sources = Sources(read)
    module = sources.module(SERVER_ARGS)
    if module is None:
        raise DeployError("DD610", f"{SERVER_ARGS} is missing or is not Python", "is this a tree of sglang?")
    owner = module.names.get("ServerArgs")
    function = _method(owner, "add_cli_args") if isinstance(owner, ast.ClassDef) else None
    if not isinstance(owner, ast.ClassDef) or function is None:
        raise DeployError("DD610", f"{SERVER_ARGS} declares no ServerArgs.add_cli_args that can be read")
    reader = _Reader(module, owner)
    reader.statements(function.body, {})
    if not reader.flags:
        raise DeployError("DD610", f"{SERVER_ARGS}: no flag could be read from ServerArgs.add_cli_args")
    # A name that is registered twice is a copy-paste error in the engine that argparse refuses at start.
    return EngineParser(tuple(reader.flags), tuple(reader.unread))


def _method(owner: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


class _Reader:
    def __init__(self, module: Module, owner: ast.ClassDef) -> None:
        self._module = module
        self._owner = owner
        self.flags: list[Flag] = []
        self.unread: list[str] = []

    def statements(self, body: list[ast.stmt], scope: dict[str, Any]) -> None:
        """Follow the statements of ``add_cli_args`` in order; ``scope`` gathers its local names."""
        for statement in body:
            if isinstance(statement, ast.Assign | ast.AnnAssign | ast.ImportFrom):
                bind([statement], scope)
            call = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
            if isinstance(call, ast.Call):
                self._call(call, scope)
            elif isinstance(statement, ast.If | ast.Try | ast.For | ast.With):
                self.statements(statement.body, scope)
                if isinstance(statement, ast.If | ast.Try):
                    self.statements(statement.orelse, scope)

    def _call(self, call: ast.Call, scope: dict[str, Any]) -> None:
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "add_argument":
            self._add(call, scope)
        elif isinstance(function, ast.Name) and function.id == "add_cli_args_from_dataclass":
            for owner, module in self._declaring():
                for statement in owner.body:
                    if isinstance(statement, ast.AnnAssign):
                        self._field(statement, module)
        elif any(isinstance(argument, ast.Name) and argument.id == "parser" for argument in call.args):
            self._delegated(call)

    def _delegated(self, call: ast.Call) -> None:
        """A call that hands the parser on, such as ``Config.add_cli_args(parser)``."""
        function = call.func
        target: Any = UNKNOWN
        if isinstance(function, ast.Name):
            target = self._module.value(function)
        elif isinstance(function, ast.Attribute):
            owner = self._module.value(function.value)
            node = _method(owner.node, function.attr) if isinstance(owner, ClassNode) else None
            if node is not None:
                target = FunctionNode(node, owner.module)
        if isinstance(target, FunctionNode):
            inner = _Reader(target.module, self._owner)
            inner.statements(target.node.body, {})
            self.flags += inner.flags
            self.unread += inner.unread
        else:
            self.unread.append(ast.unparse(call)[:120])

    def _declaring(self) -> Iterator[tuple[ast.ClassDef, Module]]:
        """The classes whose annotated fields become flags: ServerArgs itself, and the namespaces of later versions."""
        yield self._owner, self._module
        namespaces = self._module.lookup("_INPUT_NAMESPACES")
        for namespace in namespaces if isinstance(namespaces, list) else ():
            if isinstance(namespace, ClassNode):
                yield namespace.node, namespace.module

    # A call of add_argument.

    def _add(self, call: ast.Call, scope: dict[str, Any]) -> None:
        names = [self._module.value(argument, scope) for argument in call.args]
        if not names or not all(isinstance(name, str) and name.startswith("-") for name in names):
            self.unread.append(ast.unparse(call)[:120])
            return
        keywords = {word.arg: word.value for word in call.keywords if word.arg}
        self.flags.append(self._flag(tuple(names), keywords, self._module, scope))

    def _flag(
        self, names: tuple[str, ...], keywords: Mapping[str, ast.expr], module: Module, scope: dict[str, Any]
    ) -> Flag:
        """A flag from the keywords of an ``add_argument``."""
        action = _action(keywords.get("action"))
        takes, deprecated = _takes(action, "nargs" in keywords, self._literal(keywords, "nargs", module, scope))
        if action == "BooleanOptionalAction":
            names += tuple(f"--no-{name[2:]}" for name in names if name.startswith("--"))
        successor = self._literal(keywords, "new_flag", module, scope)
        converter = keywords.get("type")
        return Flag(
            names,
            takes,
            ("str" if converter is None else _scalar(converter)) if takes != NONE else None,
            _choices(self._literal(keywords, "choices", module, scope)),
            self._literal(keywords, "default", module, scope) if "default" in keywords or takes != NONE else False,
            self._literal(keywords, "required", module, scope) is True,
            deprecated,
            successor if isinstance(successor, str) else None,
        )

    def _literal(self, keywords: Mapping[str, ast.expr], name: str, module: Module, scope: dict[str, Any]) -> Any:
        return module.value(keywords[name], scope) if name in keywords else None

    # An annotated field.

    def _field(self, statement: ast.AnnAssign, module: Module) -> None:
        annotation = statement.annotation
        if not isinstance(statement.target, ast.Name) or not isinstance(annotation, ast.Subscript):
            return
        if not isinstance(annotation.value, ast.Name) or annotation.value.id not in ("A", "Annotated"):
            return
        inner, *metadata = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        words = next((found for found in map(_metadata, metadata) if found is not None), None)
        if words is None or ("no_cli" in words and module.value(words["no_cli"]) is True):
            return
        name = module.value(words["cli_name"]) if "cli_name" in words else None
        aliases = module.value(words["aliases"]) if "aliases" in words else None
        names: tuple[str, ...] = (name if isinstance(name, str) else "--" + statement.target.id.replace("_", "-"),)
        if isinstance(aliases, list):
            names += tuple(alias for alias in aliases if isinstance(alias, str))
        self.flags.append(self._derived(names, words, _unwrapped(inner), statement.value, module))

    def _derived(
        self,
        names: tuple[str, ...],
        words: Mapping[str, ast.expr],
        inner: ast.expr,
        default: ast.expr | None,
        module: Module,
    ) -> Flag:
        """A flag from a field, by the rules of the engine's ``add_cli_args_from_dataclass``."""
        value = UNKNOWN if default is None else module.value(default)
        if "action" in words:
            keywords = {key: words[key] for key in ("action", "choices") if key in words}
            more = words.get("action_kwargs")
            if isinstance(more, ast.Dict):
                pairs = zip(more.keys, more.values, strict=True)
                keywords |= {str(module.value(key)): item for key, item in pairs if key is not None}
            flag = self._flag(names, keywords, module, {})
            return flag if default is None else replace(flag, default=value)
        literals = _literals(inner, module)
        own_converter = "type_parser" in words
        choices = _choices(module.value(words["choices"])) if "choices" in words else None
        takes, kind = ONE, _scalar(inner) or "str"
        if literals is not None:
            choices = choices or tuple(map(str, literals))
            kind = "int" if literals and isinstance(literals[0], int) else "str"
        elif _is_list(inner) and not own_converter:
            takes = MANY
            kind = _scalar(_element(inner)) or "str"
        elif isinstance(inner, ast.Name) and inner.id == "bool" and not own_converter:
            return Flag(names, NONE, None, None, value, False)
        if "nargs" in words:
            takes = _NARGS.get(module.value(words["nargs"]), MANY)
        required = module.value(words["required"]) if "required" in words else None
        needed = required is True or (required is None and default is None and takes == ONE and literals is None)
        return Flag(names, takes, None if own_converter else kind, choices, value, needed)


def _action(node: ast.expr | None) -> str:
    """The name of an action: a string of argparse's, or the class."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else "store"


def _takes(action: str, has_nargs: bool, nargs: Any) -> tuple[str, bool]:
    """How many values a flag of that action takes, and whether it is deprecated."""
    deprecated = action.startswith("Deprecated")
    if action in _SWITCHES or action == "BooleanOptionalAction":
        return NONE, deprecated
    if action in _DEPRECATED_SWITCHES and not has_nargs:
        return NONE, deprecated
    if not has_nargs or nargs is None:
        return ONE, deprecated
    return _NARGS.get(nargs if isinstance(nargs, int | str) else "+", MANY), deprecated


def _choices(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, list) or not all(isinstance(item, str | int | None) for item in value):
        return None
    return tuple(str(item) for item in value if item is not None)


def _metadata(node: ast.expr) -> Mapping[str, ast.expr] | None:
    """The keywords of an ``Arg(...)``; a bare text is its help."""
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
        return {}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Arg":
        return {word.arg: word.value for word in node.keywords if word.arg}
    return None


def _unwrapped(node: ast.expr) -> ast.expr:
    """``X`` of ``Optional[X]``, ``Union[X, None]`` and ``X | None``."""
    parts: Iterable[ast.expr] = ()
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        if node.value.id == "Optional":
            return node.slice
        if node.value.id == "Union" and isinstance(node.slice, ast.Tuple):
            parts = node.slice.elts
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        parts = (node.left, node.right)
    given = [part for part in parts if not (isinstance(part, ast.Constant) and part.value is None)]
    return given[0] if len(given) == 1 else node


def _scalar(node: ast.expr | None) -> str | None:
    return node.id if isinstance(node, ast.Name) and node.id in _SCALARS else None


def _is_list(node: ast.expr) -> bool:
    named = node.value if isinstance(node, ast.Subscript) else None
    return isinstance(named, ast.Name) and named.id in ("List", "list")


def _element(node: ast.expr) -> ast.expr | None:
    return node.slice if isinstance(node, ast.Subscript) else None


def _literals(node: ast.expr, module: Module) -> list[Any] | None:
    """The values of a ``Literal[...]``, which may have a name of its own."""
    if isinstance(node, ast.Name):
        bound = module.names.get(node.id)
        node = bound if isinstance(bound, ast.expr) else node
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name) or node.value.id != "Literal":
        return None
    values = module.value(node.slice)
    return values if isinstance(values, list) else [values]
