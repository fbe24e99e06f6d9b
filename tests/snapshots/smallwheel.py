"""A small wheel that is sound, or not."""

from __future__ import annotations

import base64
import hashlib
import stat
import zipfile
from pathlib import Path

INFO = "sglang-0.0.1.dist-info"
FILES = {
    "sglang/__init__.py": b"",
    "sglang/srt/a.py": b"A = 1\n",
    "sglang/srt/tool.sh": b"#!/bin/sh\n",
    "sglang/lang/x.py": b"x\n",
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: sglang\nVersion: 0.0.1\n\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\n",
}


def row(path: str, data: bytes) -> str:
    return f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"


def make_wheel(
    path: Path, files: dict[str, bytes] = FILES, record: str | None = None, links: tuple[str, ...] = ()
) -> Path:
    rows = (
        record if record is not None else "\n".join([*(row(*item) for item in files.items()), f"{INFO}/RECORD,,", ""])
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [*files.items(), (f"{INFO}/RECORD", rows.encode())]:
            info = zipfile.ZipInfo(name)
            kind = stat.S_IFLNK if name in links else stat.S_IFREG
            info.external_attr = (kind | (0o775 if name.endswith(".sh") else 0o664)) << 16
            archive.writestr(info, data)
    return path
