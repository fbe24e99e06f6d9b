"""Where a symbol is defined and used, by syntax tree. Pure: sources in, findings out.

A file is parsed only if its bytes hold the symbol's names. One that does and cannot be parsed (damaged, or
newer syntax than this interpreter's) is reported as unparsed, with what a look at its lines suggests.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from typing import Any, Callable, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from .protocol import AgentError

# What a definition is -> its place in the output.
RANKS = {
    "class": 0,
    "function": 0,
    "async function": 0,
    "method": 0,
    "async method": 0,
    "lambda": 0,
    "name": 1,
    "class attribute": 2,
    "instance attribute": 3,
    "local": 4,
    "import": 5,
    "unparsed": 6,
}
SUFFIXES = (".py", ".pyi")
MAX_WINDOW = 1_000_000

_LINE_END = re.compile(r"\r\n|\r|\n")
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_PYTHON = "python %d.%d" % sys.version_info[:2]


class Definition(NamedTuple):
    """One place that binds the symbol. Lines count from 1; ``end`` is the last line of the definition.

    ``first`` is the line of the first decorator, or ``line`` (that of ``def``, ``class`` or the target).
    ``body`` are the lines of the asked-for window from ``body_line`` on, without their line ends; of an import,
    the one statement that brings this name.
    """

    name: str
    module: str
    kind: str
    path: str
    line: int
    end: int
    first: int
    decorators: List[str]
    body_line: int
    body: List[str]


class Reference(NamedTuple):
    """A use of the symbol's last name; ``scope`` is the qualified name of the function or class around it.

    ``label`` is "name", "attribute", "keyword", "parameter", "import", "global" or "string".
    """

    path: str
    line: int
    text: str
    label: str
    scope: str


class Unparsed(NamedTuple):
    """A file that holds the symbol and could not be parsed; ``line`` is where the parser gave up, if it said."""

    path: str
    line: Optional[int]
    reason: str


class Findings(NamedTuple):
    """All that was found: definitions by rank, path and line; the others by path and line."""

    definitions: List[Definition]
    references: List[Reference]
    unparsed: List[Unparsed]


class FindOptions:
    """The symbol, and the window to show: ``before`` and ``after`` lines round the ``def``, or the whole definition."""

    def __init__(self, symbol: str, before: int = 20, after: int = 80, whole: bool = False, refs: bool = False) -> None:
        """Raises AgentError DD008 for what is not a dotted name."""
        if not symbol.isascii():
            import unicodedata

            symbol = unicodedata.normalize("NFKC", symbol)  # as the compiler does with identifiers
        self.parts = symbol.split(".")
        if not all(part.isidentifier() for part in self.parts):
            raise AgentError(
                "DD008",
                "%r is not a symbol" % symbol,
                "a symbol is a name, or names with dots: f, Class.method, sglang.srt.module.f",
            )
        for value in (before, after):
            if not 0 <= value <= MAX_WINDOW:
                raise AgentError("DD008", "%d is not a number of lines" % value)
        self.symbol = symbol
        self.name = self.parts[-1]
        self.before = before
        self.after = after
        self.whole = whole
        self.refs = refs
        self._words = {part: _word(part) for part in self.parts}

    def may_hold(self, path: str, data: bytes) -> bool:
        """False only if the file does not mention the symbol: its last name, and the others here or in the path."""
        if not self._words[self.name](data):
            return False
        if self.refs:
            return True
        module = module_name(path).split(".")
        return all(part in module or self._words[part](data) for part in self.parts[:-1])

    @classmethod
    def parse(cls, request: Mapping[str, Any]) -> FindOptions:
        """From a request's keys: ``symbol`` and, where set, the other parameters by name."""
        names = ("before", "after", "whole", "refs")
        return cls(request["symbol"], **{name: request[name] for name in names if name in request})


def _word(name: str) -> Callable[[bytes], bool]:
    raw = name.encode("utf-8")
    search = re.compile(rb"(?<![A-Za-z0-9_])" + re.escape(raw) + rb"(?![A-Za-z0-9_])").search
    return lambda data: raw in data and search(data) is not None


def find_def(files: Iterable[Tuple[str, bytes]], options: FindOptions) -> Findings:
    """What the Python sources among ``files`` (path, bytes) say about the symbol."""
    found = Findings([], [], [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the parser, about other people's escape sequences
        for path, data in files:
            if path.endswith(SUFFIXES) and options.may_hold(path, data):
                _search(path, data, options, found)
    found.definitions.sort(key=lambda item: (RANKS[item.kind], _bytes(item.path), item.line))
    found.references.sort(key=lambda item: (_bytes(item.path), item.line, item.label))
    found.unparsed.sort(key=lambda item: _bytes(item.path))
    return found


def _bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _search(path: str, data: bytes, options: FindOptions, found: Findings) -> None:
    try:
        tree = ast.parse(data, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, reason = None, str(error)
        if isinstance(error, SyntaxError):
            line, reason = error.lineno, error.msg
        elif isinstance(error, (RecursionError, MemoryError)):
            reason = "it is nested too deeply"
        found.unparsed.append(Unparsed(path, line, "%s cannot parse it: %s" % (_PYTHON, reason)))
        found.definitions.extend(_guesses(path, data, options))
        return
    source = _Source(path, data)
    module = module_name(path)
    own: Set[int] = set()
    for binding in _bindings(tree, b":=" in data):
        if binding.name != options.name:
            continue
        own.add(id(binding.node))
        dotted = (module + "." + binding.qualified).split(".")
        if dotted[-len(options.parts) :] == options.parts:
            found.definitions.append(source.definition(binding, module, options))
    if options.refs:
        seen = set()
        for line, label, scope in _references(tree, options.name, own, source):
            if (line, label) not in seen:
                seen.add((line, label))
                found.references.append(Reference(path, line, source.line(line), label, scope))


def module_name(path: str) -> str:
    """``sglang.srt.x`` for ``sglang/srt/x.py``, and for ``sglang/srt/x/__init__.py``."""
    stem = path.rpartition(".")[0]
    if stem.endswith("/__init__"):
        stem = stem.rpartition("/")[0]
    return stem.replace("/", ".")


def _decode(data: bytes) -> str:
    if data.startswith(b"\xef\xbb\xbf"):
        return data[3:].decode("utf-8", "surrogateescape")
    for line in data.split(b"\n", 2)[:2]:
        cookie = _COOKIE.match(line)
        if cookie:
            try:
                return data.decode(cookie.group(1).decode("ascii"), "replace")
            except LookupError:
                break
    return data.decode("utf-8", "surrogateescape")


class _Source:
    """A file's lines as the parser counts them."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self._lines = _LINE_END.split(_decode(data))
        if not self._lines[-1]:
            self._lines.pop()

    def __len__(self) -> int:
        return len(self._lines)

    def line(self, number: int) -> str:
        return self._lines[number - 1] if 0 < number <= len(self._lines) else ""

    def window(self, first: int, last: int) -> Tuple[int, List[str]]:
        first = max(1, first)
        return first, self._lines[first - 1 : last]

    def near(self, name: str, first: int, last: int) -> int:
        """The first of these lines that holds ``name``; ``first`` when none does."""
        for number in range(first, last + 1):
            if name in self.line(number):
                return number
        return first

    def segment(self, node: Any) -> str:
        """The node's source in one line (columns are counted in UTF-8 bytes)."""
        lines = [line.encode("utf-8", "surrogateescape") for line in self._lines[node.lineno - 1 : node.end_lineno]]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b" ".join(line.strip() for line in lines).decode("utf-8", "surrogateescape")

    def definition(self, binding: _Binding, module: str, options: FindOptions) -> Definition:
        decorators = getattr(binding.node, "decorator_list", [])
        first = min([binding.first] + [item.lineno for item in decorators])
        line = binding.line
        if binding.kind == "import":
            if not hasattr(binding.node, "lineno"):
                line = self.near(binding.name, binding.first, binding.end)
            start, body = line, [binding.text]
        elif options.whole:
            start, body = self.window(first, binding.end)
        else:
            start, body = self.window(line - options.before, line + options.after)
        return Definition(
            binding.qualified,
            module,
            binding.kind,
            self.path,
            line,
            binding.end,
            first,
            ["@" + self.segment(item) for item in decorators],
            start,
            body,
        )


def _guesses(path: str, data: bytes, options: FindOptions) -> Iterator[Definition]:
    """Lines of an unparsed file that look as if they defined the symbol's last name."""
    name = re.escape(options.name)
    looks = re.compile(
        r"[ \t]*(?:(?:async[ \t]+)?(?:def|class)[ \t]+%s(?!\w)|%s[ \t]*(?::[^=]*)?=(?!=))" % (name, name)
    )
    source = _Source(path, data)
    for number in range(1, len(source) + 1):
        if looks.match(source.line(number)):
            start, body = source.window(number - options.before, number + options.after)
            yield Definition(options.name, module_name(path), "unparsed", path, number, number, number, [], start, body)


class _Binding(NamedTuple):
    name: str
    qualified: str
    kind: str
    node: Any
    line: int
    first: int
    end: int
    text: str = ""  # of an import: the statement as if it brought this name alone


class _Scope:
    """The function, class or module that a statement is in."""

    def __init__(self, kind: str, qualified: str, receiver: Optional[Tuple[str, str, str]] = None) -> None:
        self.kind = kind
        self.qualified = qualified
        # (parameter name, class's qualified name, kind of what is assigned through it), in a method.
        self.receiver = receiver
        self.globals: Set[str] = set()

    def qualify(self, name: str) -> str:
        return self.qualified + "." + name if self.qualified else name

    def name_kind(self) -> str:
        return {"module": "name", "class": "class attribute", "function": "local"}[self.kind]


def _function_scope(node: Any, scope: _Scope) -> _Scope:
    inner = _Scope("function", scope.qualify(node.name))
    arguments = node.args
    names = [item.arg for item in getattr(arguments, "posonlyargs", []) + arguments.args]
    if scope.kind == "class":
        decorators = {item.id for item in node.decorator_list if isinstance(item, ast.Name)}
        if names and "staticmethod" not in decorators:
            kind = "class attribute" if "classmethod" in decorators else "instance attribute"
            inner.receiver = (names[0], scope.qualified, kind)
    elif scope.receiver and scope.receiver[0] not in names:
        # A function inside a method sees the method's self.
        inner.receiver = scope.receiver
    return inner


def _bindings(tree: ast.AST, walruses: bool) -> Iterator[_Binding]:
    """Every binding in the module, nested ones too; expressions are searched only if there are ``walruses``."""
    stack: List[Tuple[Any, _Scope]] = [(tree, _Scope("module", ""))]
    while stack:
        node, scope = stack.pop()
        inner = scope
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kind = "method" if scope.kind == "class" else "function"
            kind = "async " + kind if isinstance(node, ast.AsyncFunctionDef) else kind
            yield _Binding(
                node.name, scope.qualify(node.name), kind, node, node.lineno, node.lineno, node.end_lineno or 0
            )
            inner = _function_scope(node, scope)
        elif isinstance(node, ast.ClassDef):
            yield _Binding(
                node.name, scope.qualify(node.name), "class", node, node.lineno, node.lineno, node.end_lineno or 0
            )
            inner = _Scope("class", scope.qualify(node.name))
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            if isinstance(node, ast.Global):
                scope.globals.update(node.names)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                bound = alias.asname or (alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name)
                line = getattr(alias, "lineno", node.lineno)  # an alias has its own line since 3.10
                end = node.end_lineno or line
                yield _Binding(
                    bound, scope.qualify(bound), "import", alias, line, node.lineno, end, _imported(node, alias)
                )
        else:
            for target, span in _targets(node):
                yield from _assigned(target, span, scope, node)
        below = [(child, inner) for child in ast.iter_child_nodes(node) if walruses or not isinstance(child, ast.expr)]
        stack.extend(reversed(below))


def _imported(statement: Any, alias: Any) -> str:
    text = "import %s as %s" % (alias.name, alias.asname) if alias.asname else "import %s" % alias.name
    if isinstance(statement, ast.ImportFrom):
        return "from %s%s %s" % ("." * (statement.level or 0), statement.module or "", text)
    return text


def _targets(node: Any) -> Iterator[Tuple[Any, Any]]:
    """What a statement or expression assigns to: (target, the node whose lines are the definition)."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        yield node.target, node
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        yield node.target, node.target
    elif isinstance(node, ast.withitem):
        if node.optional_vars is not None:
            yield node.optional_vars, node.optional_vars
    else:
        kind = type(node).__name__  # these are not in every version's ast
        if kind in ("TypeAlias", "ExceptHandler", "MatchAs", "MatchStar"):
            if node.name:
                yield node.name, node
        elif kind == "MatchMapping" and node.rest:
            yield node.rest, node


def _assigned(target: Any, span: Any, scope: _Scope, node: Any) -> Iterator[_Binding]:
    stack = [target]
    while stack:
        item = stack.pop()
        if isinstance(item, (ast.Tuple, ast.List)):
            stack.extend(reversed(item.elts))
        elif isinstance(item, ast.Starred):
            stack.append(item.value)
        elif isinstance(item, str):
            yield _bound(item, scope, node, node.lineno, node.lineno, node.lineno)
        elif isinstance(item, ast.Name):
            function = isinstance(getattr(node, "value", None), ast.Lambda) and item is target
            yield _bound(item.id, scope, item, item.lineno, span.lineno, span.end_lineno, function)
        elif isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and scope.receiver:
            receiver, owner, kind = scope.receiver
            if item.value.id == receiver:
                line = item.end_lineno or item.lineno
                yield _Binding(item.attr, owner + "." + item.attr, kind, item, line, span.lineno, span.end_lineno)


def _bound(name: str, scope: _Scope, node: Any, line: int, first: int, end: int, function: bool = False) -> _Binding:
    if name in scope.globals:
        return _Binding(name, name, "lambda" if function else "name", node, line, first, end)
    kind = "lambda" if function else scope.name_kind()
    return _Binding(name, scope.qualify(name), kind, node, line, first, end)


def _references(tree: ast.AST, name: str, own: Set[int], source: _Source) -> Iterator[Tuple[int, str, str]]:
    """(line, label, scope) of every use of ``name`` that is not one of the bindings ``own`` (by node id)."""
    # The third: the nearest node around that has lines, and whether those inside it can be trusted.
    stack: List[Tuple[Any, str, Any]] = [(tree, "", None)]
    while stack:
        node, scope, around = stack.pop()
        label = None if id(node) in own else _label(node, name)
        if label:
            span: Any = node if hasattr(node, "lineno") else around
            line = span.end_lineno if isinstance(node, ast.Attribute) else span.lineno
            if name not in source.line(line):
                # Many names in one statement, a string over many lines, an f-string before 3.12.
                span = around if isinstance(around, ast.JoinedStr) else span
                line = source.near(name, span.lineno, span.end_lineno)
            yield line, label, scope
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope = scope + "." + node.name if scope else node.name
        if hasattr(node, "lineno") and not isinstance(around, ast.JoinedStr):
            around = node
        stack.extend((child, scope, around) for child in ast.iter_child_nodes(node))


def _label(node: Any, name: str) -> Optional[str]:
    """How a node mentions ``name``, None if it does not."""
    label: Optional[str] = None
    if isinstance(node, ast.Name):
        label = "name" if node.id == name else None
    elif isinstance(node, ast.Attribute):
        label = "attribute" if node.attr == name else None
    elif isinstance(node, ast.keyword):
        label = "keyword" if node.arg == name else None
    elif isinstance(node, ast.arg):
        label = "parameter" if node.arg == name else None
    elif isinstance(node, ast.Constant):
        # A name in quotes (__all__, getattr, a registry), alone or at the end of a dotted path.
        text = node.value
        label = "string" if isinstance(text, str) and (text == name or text.endswith("." + name)) else None
    elif isinstance(node, ast.alias):
        label = "import" if name in node.name.split(".") else None
    elif isinstance(node, ast.ImportFrom):
        label = "import" if name in (node.module or "").split(".") else None
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
        label = "global" if name in node.names else None
    elif type(node).__name__ == "MatchClass":
        label = "keyword" if name in node.kwd_attrs else None
    return label
