"""File names in diffs: C-style quoting, strip levels, and which names may be touched at all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ddtree_deploy.patching.problems import Problem, as_error, printable

# Text files that live in the engine's package. Others (compiled code, weights) are no matter for a diff.
SUFFIXES = frozenset(
    (
        *(".py", ".pyi", ".json", ".md", ".txt", ".toml", ".yaml", ".yml", ".cfg", ".ini", ".jinja", ".sh"),
        *(".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".proto", ".html", ".csv", ".typed"),
    )
)
#: The names that a patch set may have: no tool needs to quote them.
PLAIN_PATH = re.compile(r"[A-Za-z0-9._+@/-]+")
TEMP_PREFIX = ".ddtree-"
_MAX_PATH, _MAX_COMPONENT = 1024, 200
_ESCAPES = {
    **{ord("a"): 7, ord("b"): 8, ord("t"): 9, ord("n"): 10, ord("v"): 11, ord("f"): 12, ord("r"): 13},
    **{ord('"'): 34, ord("\\"): 92},
}
_OCTAL = re.compile(rb"[0-3][0-7][0-7]")
_DRIVE = re.compile(r"[A-Za-z]:")


class BadNameError(ValueError):
    """A name that a diff may not use; the message says why, without the name."""


def unquote(text: bytes) -> tuple[bytes, bytes]:
    """Split ``"quoted"rest`` into the name that git's C-style quoting stands for, and the rest.

    Raises BadNameError for an unknown escape or a missing end quote.
    """
    name = bytearray()
    at = 1
    while at < len(text):
        byte = text[at]
        if byte == ord('"'):
            return bytes(name), text[at + 1 :]
        if byte != ord("\\"):
            name.append(byte)
            at += 1
            continue
        octal = _OCTAL.match(text, at + 1)
        escape = text[at + 1] if at + 1 < len(text) else None
        if octal:
            name.append(int(octal.group(), 8))
            at += 4
        elif escape in _ESCAPES:
            name.append(_ESCAPES[escape])
            at += 2
        else:
            raise BadNameError("its quoting has an unknown escape")
    raise BadNameError("its quoting does not end")


def why_unsafe(path: str) -> str | None:
    """Why ``path`` may not name a file below a root, or None.

    Safe is: relative, of plain components without ``.`` and ``..``, no control character, no backslash,
    no drive letter, valid UTF-8, of a length that file systems take.
    """
    components = path.split("/")
    if not path:
        return "it is empty"
    if path.startswith("/"):
        return "it is absolute"
    if ".." in components:
        return "it has a '..' component"
    if "." in components or "" in components:
        return "it has an empty or '.' component"
    if "\\" in path or _DRIVE.match(path):
        return "it has a backslash or a drive letter"
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in path):
        return "it has a control character"
    try:
        encoded = [component.encode() for component in components]
    except UnicodeEncodeError:
        return "it is not valid UTF-8"
    if sum(map(len, encoded)) + len(encoded) > _MAX_PATH or max(map(len, encoded)) > _MAX_COMPONENT:
        return "it is too long"
    return None


def resolve(raw: bytes, strip: int) -> str:
    """The path that a diff's (unquoted) name stands for when ``strip`` leading components are dropped.

    A dropped component may be ``.`` but not ``..``. Raises BadNameError for an unsafe or too short name.
    """
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise BadNameError("it is not valid UTF-8") from None
    dropped, kept = name.split("/")[:strip], name.split("/")[strip:]
    whole = "/".join(["x" if component == "." else component for component in dropped] + kept)
    reason = why_unsafe(whole)
    if reason is None and not kept:
        reason = f"it has no more than {strip} components, all of which strip {strip} drops"
    if reason is None:
        reason = why_unsafe("/".join(kept))
    if reason is not None:
        raise BadNameError(reason)
    return "/".join(kept)


def why_disallowed(path: str, roots: Sequence[str], any_suffix: bool = False) -> str | None:
    """Why policy forbids touching ``path``, or None: see :func:`check_paths`."""
    unsafe = why_unsafe(path)
    if unsafe is not None:
        return unsafe
    components = path.split("/")
    if not any(path.startswith(root + "/") for root in roots):
        return "it is outside " + ", ".join(f"{root}/" for root in roots)
    if any(component.startswith(TEMP_PREFIX) for component in components):
        return f"the prefix {TEMP_PREFIX} is kept for temporary files"
    if "__pycache__" in components or path.endswith((".pyc", ".pyo")):
        return "it is bytecode"
    if any(component.endswith((".dist-info", ".egg-info")) for component in components):
        return "it is the installer's own record"
    suffix = "." + components[-1].rpartition(".")[2] if "." in components[-1][1:] else ""
    if suffix not in SUFFIXES and not any_suffix:
        return f"files of the kind {suffix or '(no suffix)'} are not patched without --any-suffix"
    return None


def check_paths(paths: Iterable[str], roots: Sequence[str] = ("sglang",), any_suffix: bool = False) -> None:
    """Refuse (DD105, all at once) paths outside ``roots``, bytecode, installer records, our temporary
    names, and suffixes that are not text of the engine's package unless ``any_suffix``.
    """
    problems = []
    for path in paths:
        reason = why_disallowed(path, roots, any_suffix)
        if reason is not None:
            problems.append(Problem("DD105", f"{printable(path.encode('utf-8', 'surrogateescape'))}: {reason}"))
    if problems:
        raise as_error(problems, "paths that may not be patched")
