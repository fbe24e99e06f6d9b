"""The keys of a ``[hosts.NAME]`` table: each converter turns a TOML value into ours or raises ValueError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree_deploy.hosts.target import NAME, TRANSPORTS, expand_home, parse_container, parse_destination
from ddtree_deploy.wording import wrong_type


def _text(value: object, _folder: Path) -> str:
    if not isinstance(value, str):
        raise ValueError(wrong_type("a string", value))
    if not value or not value.isprintable():
        raise ValueError("must not be empty or hold control characters")
    return value


def _destination(value: object, folder: Path) -> str:
    text = _text(value, folder)
    parse_destination(text)
    return text


def _container(value: object, folder: Path) -> str:
    text = _text(value, folder)
    parse_container(text)
    return text


def _transport(value: object, folder: Path) -> str:
    text = _text(value, folder)
    if text not in TRANSPORTS:
        raise ValueError(f"must be {' or '.join(TRANSPORTS)}, not {text!r}")
    return text


def _flag(value: object, _folder: Path) -> bool:
    if not isinstance(value, bool):
        raise ValueError(wrong_type("a boolean", value))
    return value


def _absolute(value: object, folder: Path) -> str:
    """A path on the host."""
    text = _text(value, folder)
    if not text.startswith("/"):
        raise ValueError(f"must be an absolute path on the host, not {text!r}")
    return text


def _program(value: object, folder: Path) -> str:
    """An interpreter on the host. fish reads a backslash inside quotes, and csh a `!`."""
    text = _absolute(value, folder)
    if odd := sorted(set(text) & set("\\!")):
        raise ValueError(f"holds {odd[0]}, which some login shells do not leave alone: give it a plain name by a link")
    return text


def _here(value: object, folder: Path) -> str:
    """A path on this machine: ``~`` is expanded, a relative one counts from the inventory's folder."""
    return str((folder / expand_home(_text(value, folder))).absolute())


def _config_file(value: object, folder: Path) -> str:
    return "none" if value == "none" else _here(value, folder)


def _seconds(value: object, _folder: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(wrong_type("a number of seconds", value))
    if not 0 < value <= 600:
        raise ValueError("must be more than 0 and at most 600 seconds")
    return float(value)


def _labels(value: object, folder: Path) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(wrong_type("a table of strings", value))
    for word, label in value.items():
        if not NAME.match(word):
            raise ValueError(f"{word!r} is not a label's name")
        try:
            _text(label, folder)
        except ValueError as error:
            raise ValueError(f"{word}: {error}") from None
    return dict(value)


HOST_KEYS: dict[str, Callable[[object, Path], Any]] = {
    "ssh": _destination,
    "local": _here,
    "container": _container,
    "transport": _transport,
    "python": _program,
    "any_python": _flag,
    "root": _absolute,
    "sudo": _flag,
    "state_dir": _absolute,
    "labels": _labels,
    "connect_timeout": _seconds,
    "identity_file": _here,
    "known_hosts": _here,
    "ssh_config": _config_file,
}
SSH_ONLY = frozenset(("transport", "connect_timeout", "identity_file", "known_hosts", "ssh_config"))
