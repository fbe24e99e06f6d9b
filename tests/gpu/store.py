"""The results so far: a file of JSON lines, appended to as steps finish, so that a cut run loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(paths: Iterable[Path]) -> dict[str, Record]:
    """Key -> record of all files, the last line of a key winning; a line that was cut off is left out."""
    return {record["key"]: record for path in paths if path.exists() for record in _lines(path)}


def _lines(path: Path) -> Iterator[Record]:
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and "key" in record:
            yield record


def append(path: Path, record: Record) -> None:
    """Add a record (`key`, `engine`, `step`, `result`) as one line."""
    with path.open("a") as file:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")
