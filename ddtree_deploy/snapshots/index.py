"""What a package index says about the wheels of a release: the simple API's JSON (PEP 691, PEP 700)."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from ddtree_deploy.agent.root import PACKAGE
from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots.pins import Pin, read_pins, render_pins, version_key
from ddtree_deploy.snapshots.wheels import pip_command

PYPI = "https://pypi.org/simple"
TIMEOUT = 30  # seconds
MAX_REPLY = 64 << 20  # bytes
_JSON = "application/vnd.pypi.simple.v1+json"
# pip's own order, the last one wins.
_SCOPES = ("global", "user", "site", ":env:")


def configured_index() -> str:
    """The address of the index that pip is set to use; PyPI's where there is no pip, or it says none."""
    try:
        done = subprocess.run(
            [*pip_command(), "config", "list"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
        )
    except (DeployError, OSError, subprocess.TimeoutExpired):
        return PYPI
    said = {}
    for line in done.stdout.splitlines():
        found = re.fullmatch(r"(global|user|site|:env:)\.index-url=(.*)", line)
        if found:
            said[found[1]] = "".join(shlex.split(found[2]))
    return next((said[scope] for scope in reversed(_SCOPES) if said.get(scope)), PYPI)


def published_wheels(version: str, index: str) -> tuple[Pin, ...]:
    """The wheels of a release with the hashes that the index gives. Raises DeployError DD404, DD405, DD001."""
    where, document = _ask(index)
    found = []
    try:
        for file in document["files"]:
            name = file["filename"]
            prefix = f"{PACKAGE}-{version}-"
            if name.startswith(prefix) and name.endswith(".whl"):
                tags = name.removeprefix(prefix).removesuffix(".whl")
                found.append(Pin(version, tags, file["hashes"]["sha256"], file["size"]))
        # What the index says must be what a file of pins may hold.
        if set(read_pins(render_pins(found).encode("utf-8", "replace"), where)) != set(found):
            raise TypeError("a size is no number of bytes")
    except DeployError as error:
        raise DeployError("DD405", error.message, "is this the right index? --index URL") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise DeployError("DD405", f"{where}: its answer is not the simple API's: {error!r}") from None
    if not found:
        versions = {name.split("-")[1] for name in _names(document) if name.endswith(".whl") and name.count("-") > 3}
        newest = sorted(versions, key=version_key)[-3:]
        raise DeployError(
            "DD404",
            f"{where} has no wheel of {PACKAGE} {version}",
            f"its newest are {', '.join(newest)}" if newest else "is this the right index? --index URL",
        )
    return tuple(sorted(found, key=lambda pin: pin.filename))


def _names(document: dict[str, Any]) -> list[str]:
    return [name for file in document["files"] if isinstance(name := file.get("filename"), str)]


def _ask(index: str) -> tuple[str, dict[str, Any]]:
    """(the address as it may be shown, the index's page about the package)."""
    parts = urllib.parse.urlsplit(index)
    host = parts.netloc.rpartition("@")[2]
    plain = urllib.parse.urlunsplit((parts.scheme, host, f"{parts.path.rstrip('/')}/{PACKAGE}/", parts.query, ""))
    if parts.scheme not in ("http", "https") or not host:
        raise DeployError("DD001", f"{plain} is no index's address", "--index takes http:// or https://")
    # Sent to this index alone: a redirect elsewhere does not take it along.
    passwords = urllib.request.HTTPPasswordMgrWithPriorAuth()
    if parts.username:
        user, password = (urllib.parse.unquote(part or "") for part in (parts.username, parts.password))
        passwords.add_password(None, plain, user, password, is_authenticated=True)
    opener = urllib.request.build_opener(urllib.request.HTTPBasicAuthHandler(passwords))
    hint = "look at the network and at pip's index settings, or name an index: --index URL"
    try:
        request = urllib.request.Request(plain, headers={"Accept": _JSON})  # noqa: S310 - http and https alone
        with opener.open(request, timeout=TIMEOUT) as reply:
            data = reply.read(MAX_REPLY + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise DeployError("DD404", f"{plain} does not answer: {reason}", hint) from None
    try:
        if len(data) > MAX_REPLY:
            raise ValueError("it is too large")
        document = json.loads(data)
        if not isinstance(document, dict) or not isinstance(document.get("files"), list):
            raise ValueError("there is no list of files")
    except (ValueError, RecursionError) as error:
        raise DeployError("DD405", f"{plain}: not the simple API's JSON: {error}", hint) from None
    return plain, document
