"""The diffs of ``tests/cases/diffs`` as values.

A case is ``{name, files, patch, want[, strip][, want_mode][, says]}``: ``files`` the tree before (text,
``{"base64"}`` or ``{"link"}``), ``want`` the tree after or "refuse", ``says`` what a refusal's text must hold.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.patching.images import FileImage, Image, LinkImage

FOLDER = Path(__file__).parent.parent / "cases" / "diffs"


@dataclass(frozen=True)
class Case:
    name: str
    files: dict[str, Image]
    patch: bytes
    want: dict[str, Image] | None
    strip: int
    says: tuple[str, ...]
    modes: dict[str, int]


def as_bytes(value):
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value.encode()


def as_image(value, mode=0o644):
    if isinstance(value, dict) and "link" in value:
        return LinkImage(value["link"])
    return FileImage(as_bytes(value), mode)


def load(name):
    found = []
    for item in json.loads((FOLDER / name).read_text()):
        modes = {path: int(mode, 8) & 0o777 for path, mode in item.get("want_mode", {}).items()}
        want = None
        if item["want"] != "refuse":
            want = {path: as_image(value, modes.get(path, 0o644)) for path, value in item["want"].items()}
        files = {path: as_image(value) for path, value in item["files"].items()}
        says = tuple(item.get("says", ()))
        found.append(Case(item["name"], files, as_bytes(item["patch"]), want, item.get("strip", 1), says, modes))
    return found


CASES = [case for name in sorted(path.name for path in FOLDER.glob("*.json")) for case in load(name)]
