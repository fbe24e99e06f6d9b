"""The recorded shapes in tests/cases/schemas, and docs/json.md, which is made of them.

One file a kind of document, and below parts/ one for each object that several kinds have:

- ``about``, ``commands``, ``exit``: what it is, which commands print it, the exit statuses that they may end with;
- ``maps``, ``opaque``, ``parts``: see :class:`tests.cli.shapes.Shapes`;
- ``varies``: paths whose types depend on the machine or the example inventory: any of the recorded ones will do;
- ``also``: path -> types that may come there, though the scenario brings none;
- ``explained``: where the keys are explained, if not here;
- ``fields``: path -> [types, what it is]. Elements and values need no words of their own.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cli.shapes import Shape, Shapes, ordered

FOLDER = Path(__file__).parents[1] / "cases/schemas"
PAGE = Path(__file__).parents[2] / "docs/json.md"
_SEPARATOR = " | "
_PLAIN = ("string", "integer", "number", "boolean", "array", "object", "map", "null", "absent")


@dataclass
class Recorded:
    """One file."""

    path: Path
    about: str = ""
    commands: list[str] = field(default_factory=list)
    exit: str = ""
    version: int = 1
    maps: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    varies: list[str] = field(default_factory=list)
    also: dict[str, str] = field(default_factory=dict)
    explained: str = ""
    fields: dict[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def shape(self) -> Shape:
        return {path: types.split(_SEPARATOR) for path, (types, _about) in self.fields.items()}

    def shapes(self) -> Shapes:
        return Shapes(self.maps, self.opaque, self.parts)

    def differences(self, found: Shape) -> list[str]:
        """What is otherwise than recorded, a line each."""
        lines = []
        for path in sorted(self.fields.keys() | found.keys()):
            recorded, seen = self.shape.get(path, []), found.get(path, [])
            allowed = {*recorded, *self.also.get(path, "").split(_SEPARATOR)}
            if path in self.varies and seen and set(seen) <= allowed:
                continue
            if recorded != seen:
                lines.append(
                    f"{path}: recorded {_SEPARATOR.join(recorded) or 'no'}, now {_SEPARATOR.join(seen) or 'no'}"
                )
        return lines

    def update(self, found: Shape) -> None:
        """Record what was found; descriptions stay."""
        for path in self.varies:
            if path in self.fields:
                found[path] = ordered({*self.shape[path], *found.get(path, [])})
        self.fields = {
            path: [_SEPARATOR.join(types), self.fields.get(path, ["", ""])[1]] for path, types in sorted(found.items())
        }
        self.save()

    def save(self) -> None:
        """Write the file, a line each field."""
        values = {key: value for key, value in vars(self).items() if key not in ("path", "fields") and value}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in values.items()]
        rows = [f"    {json.dumps(path)}: {json.dumps(row)}" for path, row in self.fields.items()]
        self.path.write_text("\n".join(["{", *lines, '  "fields": {', ",\n".join(rows), "  }", "}"]) + "\n")


def read(path: Path) -> Recorded:
    values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return Recorded(path, **values)


def kinds() -> dict[str, Recorded]:
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.json"))}


def parts() -> dict[str, Recorded]:
    return {path.stem: read(path) for path in sorted((FOLDER / "parts").glob("*.json"))}


HEAD = """\
# JSON documents

With `--json` a command prints one document on stdout and nothing else; notes, progress and messages go to stderr. Each
document has a `schema`, such as `ddtree-deploy.status/1`: the kind of the document and its version. Within a version
keys may be added, so leave out of account what you do not know; a key that goes, or a type or meaning that changes,
raises the version.

- A command that fails prints a document of the kind `error`, and its exit status is in it; so does a command line with
  `--json` in it that cannot be parsed (an unknown option: exit status 2). `apply` and `launch` on a host, which report
  in full also when a service did not come up, put the same object under `error` into their own.
- On several hosts (`--host` given again, `--label`) each document takes one line, in the order in which the hosts
  end, with the host's name as `host`; the last line is a document of the kind `fleet`. The exit status is the worst.
- `patchset show`, `demo` and `logs --follow` have no document.
- Paths of the engine's files are relative to the folder that holds `sglang/`. Times are UTC in ISO 8601
  (`2026-01-31T12:00:00Z`), or seconds since 1970 as numbers; sizes are bytes; digests are sha256 in hexadecimal.

Exit statuses: 0 done, 1 findings, 2 usage, 3 refused, 4 no connection, 5 locked, 6 failed and undone, 7 needs a
person, 8 a fault of this program, 130 interrupted. Those beside a kind are the ones with which *that* document is
printed; with any other one it is an `error` document.

In the tables `a.b` is a key of a key, `a[]` stands for the elements of an array, `a{}` for the values of an object
whose keys are data. `null` and `absent` are listed where they occur. Words such as *entry* are objects that several
documents have; they stand at the end.
"""


def page() -> str:
    """docs/json.md."""
    lines = [HEAD, "## Kinds\n"]
    for item in kinds().values():
        commands = ", ".join(f"`{command}`" for command in item.commands) or "every command"
        about = (
            f"`ddtree-deploy.{item.name}/{item.version}`. {item.about} Printed by {commands}. Exit status {item.exit}."
        )
        lines += [f"### {item.name}\n", _wrapped(about), "", *_table(item), ""]
    lines.append("## Parts\n")
    for item in parts().values():
        lines += [f"### {item.name}\n", _wrapped(item.about), "", *_table(item), ""]
    return "\n".join(lines).rstrip() + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _table(item: Recorded) -> list[str]:
    rows = ["| key | type | |", "|---|---|---|"]
    for path, (_types, about) in item.fields.items():
        if not path.endswith(("[]", "{}")):
            rows.append(f"| `{path}` | {_words(item, path)} | {about} |")
    if item.explained:
        rows = [row.removesuffix("| |").removesuffix("|  |") + "|" if row[2] != "-" else "|---|---|" for row in rows]
    return rows


def _words(item: Recorded, path: str) -> str:
    """The types at a path in words, those of elements and values included."""
    also = item.also.get(path, "")
    words = []
    for word in ordered({*item.fields[path][0].split(_SEPARATOR), *filter(None, also.split(_SEPARATOR))}):
        inner = {"array": f"{path}[]", "map": f"{path}{{}}"}.get(word)
        if inner in item.fields:
            words.append(f"{word} of {_words(item, inner)}")
        elif path in item.opaque:
            words.append(f"{word} (not listed here)")
        else:
            words.append(f"[{word}](#{word})" if word not in _PLAIN else word)
    return " or ".join(words)
