"""systemd's own parsers, without a running systemd.

Unit files go through the manager's test mode, which prints what it parsed; the steps that the manager takes only
at a start (variables in argv, environment files) are called in its own shared library.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SYSTEMD = next((p for p in ("/usr/lib/systemd/systemd", "/lib/systemd/systemd") if os.access(p, os.X_OK)), None)
ANALYZE = shutil.which("systemd-analyze")
_UNPRIVILEGED = 65534  # the manager refuses its test mode to root

_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " "}


def require_systemd() -> None:
    if SYSTEMD is None or ANALYZE is None:
        pytest.skip("systemd-analyze or systemd is not installed")


@dataclass
class Parsed:
    """What systemd made of one unit. ``argv`` is as it stands before variables are replaced."""

    argv: list[list[str]] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    environment_files: list[str] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)


def parse_units(units: Mapping[str, str]) -> tuple[dict[str, Parsed], str]:
    """Parse many units (name to text) in one run; returns them by name, and what systemd complained of."""
    require_systemd()
    folder = Path(tempfile.mkdtemp(prefix="ddtree-systemd-"))
    try:
        path = folder / "units"
        runtime = folder / "run"
        for made in (path, runtime):
            made.mkdir()
        for name, text in units.items():
            (path / name).write_text(text, encoding="utf-8")
        wants = " ".join(units)
        (path / "all.target").write_text(f"[Unit]\nDefaultDependencies=no\nWants={wants}\n")
        for name in ("basic.target", "shutdown.target", "network-online.target"):
            (path / name).write_text("[Unit]\nDefaultDependencies=no\n")
        folder.chmod(0o755)
        identity = {}
        if os.geteuid() == 0:
            os.chown(runtime, _UNPRIVILEGED, _UNPRIVILEGED)
            identity = {"user": _UNPRIVILEGED, "group": _UNPRIVILEGED, "extra_groups": []}
        assert SYSTEMD is not None
        run = subprocess.run(
            [SYSTEMD, "--user", "--test", "--unit=all.target", "--log-target=console"],
            env={
                "XDG_RUNTIME_DIR": str(runtime),
                "HOME": str(runtime),
                "SYSTEMD_UNIT_PATH": str(path),
                "PATH": "/usr/bin:/bin",
            },
            capture_output=True,
            timeout=60,
            **identity,
        )
        assert run.returncode == 0, run.stderr.decode()
        return _read_dump(run.stdout.decode("utf-8"), set(units)), run.stderr.decode("utf-8")
    finally:
        shutil.rmtree(folder)


def _read_dump(dump: str, wanted: set[str]) -> dict[str, Parsed]:
    found: dict[str, Parsed] = {}
    unit: Parsed | None = None
    for line in dump.split("\n"):
        start = re.match(r"\t*-> Unit (.*):$", line)
        if start:
            name = start[1]
            unit = found.setdefault(name, Parsed()) if name in wanted else None
            continue
        if unit is None:
            continue
        key, separator, value = line.lstrip("\t").partition(": ")
        if not separator:
            continue
        if key == "Command Line":
            unit.argv.append(_unquote(value))
        elif key == "Environment":
            unit.environment.append(value)
        elif key == "EnvironmentFile":
            unit.environment_files.append(value)
        else:
            unit.properties.setdefault(key, value)
    return found


def _unquote(line: str) -> list[str]:
    """Undo the quoting of systemd's dump: bare words and C-escaped words in double quotes."""
    words: list[str] = []
    at = 0
    while at < len(line):
        if line[at] == " ":
            at += 1
        elif line[at] == '"':
            word, at = _quoted(line, at + 1)
            words.append(word)
        else:
            end = line.find(" ", at)
            end = len(line) if end < 0 else end
            words.append(line[at:end])
            at = end
    return words


def _quoted(line: str, at: int) -> tuple[str, int]:
    out: list[str] = []
    while line[at] != '"':
        if line[at] != "\\":
            out.append(line[at])
            at += 1
        elif octal := re.compile(r"[0-7]{3}").match(line, at + 1):
            out.append(chr(int(octal[0], 8)))
            at += 4
        else:
            out.append(_ESCAPES.get(line[at + 1], line[at + 1]))
            at += 2
    return "".join(out), at + 1


def shared_library() -> ctypes.CDLL:
    """systemd's private library, which the manager itself runs on."""
    require_systemd()
    places = ("/usr/lib", "/lib", "/usr/lib64")
    for place in places:
        for pattern in ("systemd/libsystemd-shared-*.so", "*/systemd/libsystemd-shared-*.so"):
            for path in sorted(Path(place).glob(pattern)):
                library = ctypes.CDLL(str(path))
                if hasattr(library, "load_env_file") and hasattr(library, "replace_env_argv"):
                    return library
    pytest.skip("this systemd's shared library does not give out its environment functions")


def _strings(values: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    array = (ctypes.c_char_p * (len(values) + 1))()
    for index, value in enumerate(values):
        array[index] = value.encode("utf-8")
    return array


def _listed(pointer: ctypes._Pointer[ctypes.c_char_p]) -> list[str]:
    values: list[str] = []
    while pointer and (value := pointer[len(values)]) is not None:
        values.append(value.decode("utf-8"))
    return values


def replace_variables(argv: Sequence[str], environment: Sequence[str] = ()) -> list[str]:
    """argv as the program gets it: systemd's replacement of ``$`` at a start, with this environment."""
    function = shared_library().replace_env_argv
    function.restype = ctypes.POINTER(ctypes.c_char_p)
    return _listed(function(_strings(argv), _strings(environment)))


def load_environment_file(path: str | Path) -> dict[str, str]:
    """What PID 1 takes from an environment file: its reader, then its removal of what it holds for invalid."""
    library = shared_library()
    load = library.load_env_file
    load.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.POINTER(ctypes.c_char_p))]
    result = ctypes.POINTER(ctypes.c_char_p)()
    status = load(None, str(path).encode(), ctypes.byref(result))
    assert status >= 0, os.strerror(-status)
    clean = library.strv_env_clean_with_callback
    clean.argtypes = [ctypes.POINTER(ctypes.c_char_p), ctypes.c_void_p, ctypes.c_void_p]
    clean.restype = ctypes.POINTER(ctypes.c_char_p)
    cleaned = clean(result, None, None) if result else result
    return dict(entry.split("=", 1) for entry in _listed(cleaned))


def verify(name: str, text: str) -> tuple[int, str]:
    """``systemd-analyze verify`` of a unit: exit status and whatever it printed."""
    require_systemd()
    assert ANALYZE is not None
    with tempfile.TemporaryDirectory(prefix="ddtree-systemd-") as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        run = subprocess.run(
            [ANALYZE, "verify", "--man=no", "--recursive-errors=one", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    return run.returncode, run.stdout + run.stderr
