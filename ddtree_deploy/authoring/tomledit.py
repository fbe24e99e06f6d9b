"""Making a ``patchset.toml`` say something else, with its author's comments, order and spelling kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import tomlkit
from tomlkit.items import Array, Table

from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.declaration import SCHEMA, Declaration, DeclaredFamily, FileHashes, read_declaration

_WIDTH = 100


def redeclare(data: bytes, wanted: Declaration) -> bytes:
    """The text ``data`` (b"" for a new one) changed where it does not say what ``wanted`` says, and nowhere else.

    Raises DeployError DD108 where the text is laid out so that it cannot be edited.
    """
    document = tomlkit.parse(data.decode("utf-8"))
    _top(document, wanted)
    _keyed(document, "unneeded", wanted.unneeded)
    _families(document, wanted.families)
    _hashes(document, wanted.hashes)
    text = tomlkit.dumps(document).encode("utf-8")
    if read_declaration(text, "patchset.toml") != (wanted, []):
        raise DeployError(
            "DD108",
            f"the patchset.toml of {wanted.name} cannot be edited here",
            "give every family and every file of [hashes] a table of its own",
        )
    return text


def _top(document: tomlkit.TOMLDocument, wanted: Declaration) -> None:
    plain: dict[str, Any] = {
        "schema": SCHEMA,
        "name": wanted.name,
        "version": wanted.version,
        "summary": wanted.summary,
        "package": wanted.package,
        "root": wanted.roots[0] if len(wanted.roots) == 1 else list(wanted.roots),
        "requires": list(wanted.requires),
    }
    absent: dict[str, Any] = {"requires": []}
    for key, value in plain.items():
        said = _plain(document.get(key, absent.get(key)))
        if said != value and not (key == "root" and said == list(wanted.roots)):
            document[key] = _array(value) if isinstance(value, list) else value


def _families(document: tomlkit.TOMLDocument, wanted: Mapping[str, DeclaredFamily]) -> None:
    families = _table(document, "family")
    for name in [name for name in families if name not in wanted]:
        del families[name]
    for name, family in wanted.items():
        if name not in families:
            families[name] = tomlkit.table()
        table = families[name]
        for key, value in (("engines", family.engines), ("added", family.added)):
            if _plain(table.get(key, [])) != list(value):
                table[key] = _array(value)
        _keyed(table, "left_out", family.left_out)


def _keyed(table: Any, key: str, wanted: Mapping[str, str]) -> None:
    """A table of texts below ``table``; an empty one is not written."""
    if not wanted:
        if _plain(table.get(key)):
            del table[key]
        return
    if key not in table:
        table[key] = tomlkit.table()
    inner = table[key]
    for name in [name for name in inner if name not in wanted]:
        del inner[name]
    for name, text in wanted.items():
        if inner.get(name) != text:
            inner[name] = text


def _hashes(document: tomlkit.TOMLDocument, wanted: Mapping[str, Mapping[str, FileHashes]]) -> None:
    if not wanted and "hashes" not in document:
        return
    hashes = _table(document, "hashes")
    for engine in [engine for engine in hashes if not wanted.get(engine)]:
        del hashes[engine]
    for engine, files in wanted.items():
        if not files:
            continue
        if engine not in hashes:
            hashes[engine] = tomlkit.table(is_super_table=True)
        tables = hashes[engine]
        for path in [path for path in tables if path not in files]:
            del tables[path]
        for path, both in files.items():
            if path not in tables:
                tables[path] = tomlkit.table()
            for end in ("before", "after"):
                sha = getattr(both, end)
                if sha is None:
                    tables[path].pop(end, None)
                elif tables[path].get(end) != sha:
                    tables[path][end] = sha


def _table(document: tomlkit.TOMLDocument, key: str) -> Table:
    if key not in document:
        document[key] = tomlkit.table(is_super_table=True)
    return cast(Table, document[key])


def _array(values: Sequence[str]) -> Array:
    array = tomlkit.array()
    array.extend(values)
    return array.multiline(len(array.as_string()) > _WIDTH)


def _plain(value: Any) -> Any:
    return value.unwrap() if hasattr(value, "unwrap") else value
