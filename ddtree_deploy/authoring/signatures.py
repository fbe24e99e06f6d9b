"""Whether a call fits the signature of what it calls."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_deploy.authoring.modules import Class, Function, FunctionNode, Sources, last_name

# Decorators after which a function is called with its own parameters.
_TRANSPARENT = frozenset(
    (
        *("staticmethod", "classmethod", "abstractmethod", "override", "final", "cache", "lru_cache"),
        *("contextmanager", "no_grad", "inference_mode", "debug_kernel_api"),
    )
)


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters that a call fills: by place or by name (``places``, of which the first ``positional_only`` by place
    alone), by name alone (``names``); which of them must be given; whether any others are taken.
    """

    places: tuple[str, ...]
    positional_only: int
    names: tuple[str, ...]
    required: frozenset[str]
    more_places: bool
    more_names: bool


def signature_of(sources: Sources, item: Function | Class, *, bound: bool = False) -> Signature | None:
    """How a function, or a method of an instance (``bound``), or a class is called; None when the tree cannot say."""
    if isinstance(item, Function):
        return _of_function(item.node, bound)
    if any(last_name(_called(decorator)) != "dataclass" for decorator in item.node.decorator_list):
        return None
    _, enumerated, elsewhere = sources.bases(item)
    if enumerated or elsewhere or sources.method(item, "__new__") is not None:
        return None
    own = "__init__" in sources.body(item).names
    constructor = sources.method(item, "__init__")
    if constructor is not None and (own or not item.node.decorator_list):
        return _of_function(constructor.node, True)
    return None if own or (constructor is None and _has(sources, item, "__init__")) else _of_dataclass(sources, item)


def misfit(call: ast.Call, signature: Signature) -> str | None:
    """Why a call does not fit, or None; what ``*`` and ``**`` bring is taken to be right."""
    places = len(call.args)
    unpacked = any(isinstance(argument, ast.Starred) for argument in call.args)
    names = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    spread = len(names) != len(call.keywords)
    by_name = {*signature.places[signature.positional_only :], *signature.names}
    unknown = [name for name in names if name not in by_name]
    if unknown and not signature.more_names:
        return f"it takes no argument {unknown[0]}"
    if places > len(signature.places) and not signature.more_places and not unpacked:
        return f"it takes {len(signature.places)} arguments by place, {places} are given"
    given = {*signature.places[:places], *names}
    doubled = [name for name in names if name in signature.places[:places]]
    if doubled and not unpacked:
        return f"the argument {doubled[0]} is given twice"
    missing = [name for name in (*signature.places, *signature.names) if name in signature.required - given]
    if missing and not unpacked and not spread:
        return f"the argument {missing[0]} is not given"
    return None


def _called(expression: ast.expr) -> ast.expr:
    return expression.func if isinstance(expression, ast.Call) else expression


def _of_function(node: FunctionNode, bound: bool) -> Signature | None:
    decorators = {last_name(_called(item)) for item in node.decorator_list}
    if not decorators <= _TRANSPARENT:
        return None
    arguments = node.args
    places = [*arguments.posonlyargs, *arguments.args]
    required = {argument.arg for argument in places[: len(places) - len(arguments.defaults)]}
    required |= {
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }
    names = [argument.arg for argument in places]
    only = len(arguments.posonlyargs)
    if bound and "staticmethod" not in decorators:
        if not names:
            return None
        required.discard(names.pop(0))
        only = max(only - 1, 0)
    return Signature(
        tuple(names),
        only,
        tuple(argument.arg for argument in arguments.kwonlyargs),
        frozenset(required),
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


def _of_dataclass(sources: Sources, item: Class) -> Signature | None:
    """A plain dataclass's generated ``__init__``; None for options and fields that change it in ways not read here."""
    fields: dict[str, bool] = {}  # name -> must be given
    for level in _lineage(sources, item):
        if level is None:
            return None
        for statement in level.node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            kind = last_name(
                statement.annotation.value if isinstance(statement.annotation, ast.Subscript) else statement.annotation
            )
            if kind in ("ClassVar", "InitVar", "KW_ONLY") or isinstance(statement.annotation, ast.Constant):
                return None
            value = statement.value
            if isinstance(value, ast.Call) and last_name(value.func) == "field":
                options = {keyword.arg for keyword in value.keywords}
                if options & {"init", "kw_only", None}:
                    return None
                fields[statement.target.id] = not options & {"default", "default_factory"}
            else:
                fields[statement.target.id] = value is None
    required = frozenset(name for name, needed in fields.items() if needed)
    return Signature(tuple(fields), 0, (), required, False, False)


def _lineage(sources: Sources, item: Class) -> Sequence[Class | None]:
    """The dataclasses among a class and its bases, the first base first; None for one that is more than plain."""
    bases, _, elsewhere = sources.bases(item)
    below = [level for base in bases for level in _lineage(sources, base)]
    if elsewhere or len(bases) > 1:
        return [None]
    if not item.node.decorator_list:
        return below
    options = {key.arg for decorator in item.node.decorator_list for key in getattr(decorator, "keywords", ())}
    decorators = {last_name(_called(decorator)) for decorator in item.node.decorator_list}
    return [*below, item if decorators == {"dataclass"} and not options & {"init", "kw_only", None} else None]


def _has(sources: Sources, item: Class, name: str) -> bool:
    names, unknown = sources.attributes(item)
    return unknown or name in names
