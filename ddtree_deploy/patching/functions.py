"""Which functions of a Python source differ between two versions of it, by syntax tree."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MODULE = "<module>"


@dataclass(frozen=True, slots=True)
class Function:
    """A function (``f``, ``C.m``), or the code of a class (``C``) or a module (``<module>``) outside of these.

    ``first`` and ``last`` are lines from 1, decorators included. What is nested in a function is part of it.
    """

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class FunctionChanges:
    """``added`` have the lines of the later source, ``removed`` those of the earlier one, ``changed`` are pairs.

    ``problem`` says which source does not parse, and why; nothing else is known then.
    """

    added: tuple[Function, ...] = ()
    removed: tuple[Function, ...] = ()
    changed: tuple[tuple[Function, Function], ...] = ()
    problem: str | None = None

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.problem)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all that was added, removed or changed, each once, in the order of the lines."""
        found = [*self.added, *self.removed, *(before for before, _ in self.changed)]
        return tuple(dict.fromkeys(item.name for item in sorted(found, key=_place)))


class UnparsableError(ValueError):
    """A source that is no Python; the message says where and why, on one line."""


def parse(data: bytes) -> ast.Module:
    """The syntax tree of a source as the compiler sees it (its encoding too). Raises UnparsableError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(data)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise UnparsableError(f"{where}{error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnparsableError(str(error) or "nested too deeply") from None


def changed_functions(before: bytes | None, after: bytes | None) -> FunctionChanges:
    """What differs between two versions of a Python source; None where there is no file.

    Trees are compared, so comments, blank lines and a function's place in the file are no change; a docstring is
    part of the tree. Several definitions of one name (a property and its setter, branches) are told apart by
    their content.
    """
    if before == after:
        return FunctionChanges()
    units: list[list[_Unit]] = []
    for end, data in (("before", before), ("after", after)):
        try:
            units.append([] if data is None else list(_units(data)))
        except UnparsableError as error:
            return FunctionChanges(problem=f"{end}: {error}")
    return _match(*units)


def functions(data: bytes) -> tuple[Function, ...]:
    """Every function, class and the module of a source, by first line. Raises UnparsableError."""
    return tuple(sorted((unit.function for unit in _units(data)), key=_place))


@dataclass(slots=True)
class _Unit:
    """A function, or what is left of a class or module without its functions: the lines, and the tree."""

    function: Function
    text: tuple[bytes, ...]
    node: ast.AST

    def same(self, other: _Unit) -> bool:
        return self.text == other.text or ast.dump(self.node) == ast.dump(other.node)


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _units(data: bytes) -> Iterator[_Unit]:
    tree = parse(data)
    # The compiler's lines end at \n, \r\n and \r alone.
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    last = max(len(lines) - (not lines[-1]), 1)
    yield from _split(tree, MODULE, 1, last, "", lines)


def _split(
    node: ast.Module | ast.ClassDef, name: str, first: int, last: int, prefix: str, lines: Sequence[bytes]
) -> Iterator[_Unit]:
    """The unit of a class or module, after those of the definitions in it, which are cut out of ``node``."""
    inner = _cut(node)
    own = set(range(first, last + 1))
    for item in inner:
        start = min([item.lineno, *(decorator.lineno for decorator in item.decorator_list)])
        end = item.end_lineno or item.lineno
        own.difference_update(range(start, end + 1))
        qualified = prefix + item.name
        if isinstance(item, ast.ClassDef):
            yield from _split(item, qualified, start, end, f"{qualified}.", lines)
        else:
            yield _Unit(Function(qualified, start, end), tuple(lines[start - 1 : end]), item)
    yield _Unit(Function(name, first, last), tuple(lines[number - 1] for number in sorted(own)), node)


def _cut(node: ast.AST) -> list[_Definition]:
    """Take every definition in a class or module, within its branches too, out of the tree; return them."""
    found: list[_Definition] = []
    for field, value in ast.iter_fields(node):
        if not isinstance(value, list):
            continue
        kept = []
        for item in value:
            if isinstance(item, _Definition):
                found.append(item)
                continue
            if isinstance(item, ast.stmt | ast.ExceptHandler | ast.match_case):
                found += _cut(item)
            kept.append(item)
        setattr(node, field, kept)
    return found


def _match(before: list[_Unit], after: list[_Unit]) -> FunctionChanges:
    earlier: dict[str, list[_Unit]] = {}
    for unit in before:
        earlier.setdefault(unit.function.name, []).append(unit)
    left: dict[str, list[_Unit]] = {}
    for unit in after:
        same = next((item for item in earlier.get(unit.function.name, ()) if item.same(unit)), None)
        if same is None:
            left.setdefault(unit.function.name, []).append(unit)
        else:
            earlier[unit.function.name].remove(same)
    changed: list[tuple[Function, Function]] = []
    added: list[Function] = []
    removed: list[Function] = []
    for name in dict.fromkeys([*earlier, *left]):
        old, new = earlier.get(name, []), left.get(name, [])
        paired = min(len(old), len(new))
        changed += ((one.function, two.function) for one, two in zip(old, new, strict=False))
        removed += (unit.function for unit in old[paired:])
        added += (unit.function for unit in new[paired:])
    return FunctionChanges(
        tuple(sorted(added, key=_place)),
        tuple(sorted(removed, key=_place)),
        tuple(sorted(changed, key=lambda pair: _place(pair[0]))),
    )


def _place(item: Function) -> tuple[int, int, str]:
    """Orders by line, what holds before what it holds."""
    return item.first, -item.last, item.name
