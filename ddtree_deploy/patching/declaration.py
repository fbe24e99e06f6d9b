"""``patchset.toml``: what a set says about itself, checked key by key.

::

    schema = 1
    name = "dflash-fixes"
    version = "1.0.0"
    summary = "one line"
    package = "sglang"
    root = "sglang/srt"                        # or a list
    requires = ["other-set"]                   # applied before, in this order; may be left out

    [family."0.5.11"]                          # the folder with its series and patches
    engines = ["0.5.11"]                       # exact versions
    added = ["sglang/srt/speculative/x.py"]    # taken from new/; may be left out

    [family."0.5.11".left_out]                 # patches of other families that this one does without, and why
    "0002-y.patch" = "the fault ended in 0.5.11"

    [unneeded]                                 # versions that need nothing of the set, and why: there it counts
    "0.5.20" = "fixed upstream"                # as applied for the sets that require it

    [hashes."0.5.11"."sglang/srt/speculative/y.py"]
    before = "<sha256>"                        # left out: the file is not there before
    after = "<sha256>"                         # left out: the file is not there afterwards

``left_out``, ``unneeded`` and, for a family that does nothing yet, the hashes may be absent.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_deploy.patching.names import PLAIN_PATH, why_disallowed, why_unsafe
from ddtree_deploy.patching.problems import Problem, printable
from ddtree_deploy.patching.series import NAME
from ddtree_deploy.tomllines import KeyLines

SCHEMA = 1
NEW = "new"
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+!_-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TOP_KEYS = {"schema", "name", "version", "summary", "package", "root", "requires", "unneeded", "family", "hashes"}
_KINDS = {str: "a text", list: "an array", dict: "a table", int: "a number"}


@dataclass(frozen=True, slots=True)
class FileHashes:
    """A file's sha256 before and after a set; None where the file is not there."""

    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class DeclaredFamily:
    """A family's table: its name, the exact engine versions, the added files' paths, and the patches of other
    families that it does without (name -> why).
    """

    name: str
    engines: tuple[str, ...]
    added: tuple[str, ...]
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A patchset.toml. ``hashes``: engine version -> path -> hashes. ``unneeded``: engine version -> why."""

    name: str
    version: str
    summary: str
    package: str
    roots: tuple[str, ...]
    requires: tuple[str, ...]
    families: dict[str, DeclaredFamily]
    hashes: dict[str, dict[str, FileHashes]]
    unneeded: dict[str, str] = field(default_factory=dict)


def read_declaration(data: bytes, where: str) -> tuple[Declaration | None, list[Problem]]:
    """The declaration in ``data``, or None, and every problem (DD108: ``where``, line and key)."""
    try:
        text = data.decode("utf-8")
        table = tomllib.loads(text)
    except UnicodeDecodeError as error:
        return None, [Problem("DD108", f"{where}: not UTF-8 text (byte {error.start})")]
    except RecursionError:
        return None, [Problem("DD108", f"{where}: nested too deeply")]
    except ValueError as error:
        return None, [Problem("DD108", f"{where}: {printable(str(error).encode())[1:-1]}")]
    return _Checker(table, KeyLines(text), where).check()


class _Checker:
    def __init__(self, table: dict[str, Any], lines: KeyLines, where: str) -> None:
        self.table = table
        self.lines = lines
        self.where = where
        self.problems: list[Problem] = []
        self.roots: tuple[str, ...] = ()

    def problem(self, path: tuple[str | int, ...], text: str) -> None:
        key = ".".join(_key(part) for part in path if isinstance(part, str))
        self.problems.append(Problem("DD108", f"{self.where}:{self.lines.of(path)}: {key}: {text}"))

    def check(self) -> tuple[Declaration | None, list[Problem]]:
        schema = self.table.get("schema")
        if type(schema) is not int or schema != SCHEMA:
            newer = type(schema) is int and schema > SCHEMA
            self.problem(
                ("schema",),
                f"must be {SCHEMA}" + ("; this set needs a newer ddtree-deploy" if newer else ""),
            )
            return None, self.problems
        self.unknown((), self.table, _TOP_KEYS)
        name = self.text(("name",), NAME, "letters, digits, '.', '_', '-'")
        version = self.text(("version",), _VERSION, "a version such as 1.0.0")
        summary = self.text(("summary",))
        package = self.text(("package",), NAME, "a package's name")
        self.roots = self.read_roots(package)
        requires = self.texts(("requires",), NAME, "a set's name", optional=True)
        if name and name in requires:
            self.problem(("requires",), f"{name} requires itself")
        families = self.families()
        served = {engine for family in families.values() for engine in family.engines}
        hashes = self.hashes(served)
        unneeded = self.reasons(("unneeded",), _VERSION, "an exact version")
        for engine in sorted(served.intersection(unneeded)):
            self.problem(("unneeded", engine), "a family serves that version")
        if self.problems:
            return None, self.problems
        return Declaration(name, version, summary, package, self.roots, requires, families, hashes, unneeded), []

    # -- values --------------------------------------------------------------------------------

    def value(self, path: tuple[str, ...], kind: type, optional: bool = False) -> Any:
        """The value at ``path`` if it is of ``kind``; else None, noted unless it is optional and absent."""
        table: Any = self.table
        for part in path[:-1]:
            table = table[part]
        if path[-1] not in table:
            if not optional:
                self.problem(path, "is missing")
            return None
        value = table[path[-1]]
        if not isinstance(value, kind) or isinstance(value, bool):
            self.problem(path, f"must be {_KINDS[kind]}")
            return None
        return value

    def fits(self, path: tuple[str | int, ...], value: object, pattern: re.Pattern[str] | None, what: str) -> bool:
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            self.problem(path, "must be a text of one line, not empty")
            return False
        if pattern is not None and not pattern.fullmatch(value):
            self.problem(path, f"{printable(value.encode())} is not {what}")
            return False
        return True

    def text(self, path: tuple[str, ...], pattern: re.Pattern[str] | None = None, what: str = "") -> str:
        value = self.value(path, str)
        return value if value is not None and self.fits(path, value, pattern, what) else ""

    def texts(
        self, path: tuple[str, ...], pattern: re.Pattern[str] | None, what: str, optional: bool = False
    ) -> tuple[str, ...]:
        items = self.value(path, list, optional) or []
        good: list[str] = []
        for index, item in enumerate(items):
            if not self.fits((*path, index), item, pattern, what):
                continue
            if item in good:
                self.problem((*path, index), f"{item} is named twice")
            good.append(item)
        return tuple(good)

    def unknown(self, path: tuple[str, ...], table: Mapping[str, Any], known: set[str]) -> None:
        for key in table:
            if key not in known:
                self.problem((*path, key), "is not a key of this format")

    def reasons(self, path: tuple[str, ...], pattern: re.Pattern[str], what: str) -> dict[str, str]:
        """A table of names and texts that may be left out."""
        found = self.value(path, dict, optional=True) or {}
        for name, text in found.items():
            self.fits((*path, name), name, pattern, what)
            self.fits((*path, name), text, None, "")
        return dict(found)

    def tables(self, path: tuple[str, ...], optional: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
        for key in self.value(path, dict, optional) or {}:
            table = self.value((*path, key), dict)
            if table is not None:
                yield key, table

    # -- sections ------------------------------------------------------------------------------

    def read_roots(self, package: str) -> tuple[str, ...]:
        if isinstance(self.table.get("root"), str):
            roots: tuple[str, ...] = (self.text(("root",)),)
        else:
            roots = self.texts(("root",), None, "")
            if not roots and self.table.get("root") == []:
                self.problem(("root",), "must name a folder")
        for root in roots:
            reason = why_unsafe(root) if root else None
            if root and package and reason is None and root != package and not root.startswith(package + "/"):
                reason = f"it is outside the package {package}"
            if reason:
                self.problem(("root",), f"{printable(root.encode())}: {reason}")
        return roots

    def path_fits(self, path: tuple[str | int, ...], name: str) -> bool:
        reason = why_disallowed(name, self.roots)
        if reason is None and not PLAIN_PATH.fullmatch(name):
            reason = "names in a set are of letters, digits and ._+@-"
        if reason is not None:
            self.problem(path, f"{printable(name.encode())}: {reason}")
        return reason is None

    def families(self) -> dict[str, DeclaredFamily]:
        families: dict[str, DeclaredFamily] = {}
        served: dict[str, str] = {}
        for name, table in self.tables(("family",)):
            path = ("family", name)
            if not NAME.fullmatch(name) or name == NEW:
                self.problem(path, f"{printable(name.encode())} cannot be a family's name: it is a folder's")
                continue
            self.unknown(path, table, {"engines", "added", "left_out"})
            engines = self.texts((*path, "engines"), _VERSION, "an exact version")
            if not engines and table.get("engines") == []:
                self.problem((*path, "engines"), "must name a version")
            for engine in engines:
                if engine in served and served[engine] != name:
                    self.problem((*path, "engines"), f"{engine} is served by the family {served[engine]} too")
                served[engine] = name
            added = self.texts((*path, "added"), None, "", optional=True)
            for item in added:
                self.path_fits((*path, "added"), item)
            left_out = self.reasons((*path, "left_out"), NAME, "a patch's name")
            families[name] = DeclaredFamily(name, engines, added, left_out)
        if not families and self.table.get("family") == {}:
            self.problem(("family",), "there is no family")
        return families

    def hashes(self, engines: set[str]) -> dict[str, dict[str, FileHashes]]:
        hashes: dict[str, dict[str, FileHashes]] = {}
        for engine, files in self.tables(("hashes",), optional=True):
            if engine not in engines:
                self.problem(("hashes", engine), "no family serves this version")
                continue
            hashes[engine] = {}
            for path, table in self.tables(("hashes", engine)):
                if self.path_fits(("hashes", engine, path), path):
                    hashes[engine][path] = self.file_hashes(("hashes", engine, path), table)
            if not files:
                self.problem(("hashes", engine), "has no file")
        return hashes

    def file_hashes(self, path: tuple[str, ...], table: dict[str, Any]) -> FileHashes:
        self.unknown(path, table, {"before", "after"})
        before, after = (
            self.text((*path, end), _SHA256, "a sha256 in lower-case hex") if end in table else None
            for end in ("before", "after")
        )
        if before == after:
            self.problem(path, "before and after are the same: the set must change the file")
        return FileHashes(before, after)


def _key(part: str) -> str:
    return part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else printable(part.encode("utf-8", "replace"))
