"""The operation ``doctor``: everything that the checks are judged by, as plain data, in one exec. Writes nothing.

A section that could not be looked at is ``{"error": why}``.
"""

from __future__ import annotations

import functools
import os
import pwd
import sys
import tempfile
import time
from typing import Any, Dict, List, Optional

from . import doctor_cuda, doctor_deep, doctor_gpu, doctor_host, doctor_models, doctor_python, doctor_units, standing
from .call import Call
from .doctor_probe import Fact, together
from .protocol import AgentError
from .root import Root

_SECONDS = 90.0
_MODEL_SECONDS = 60.0


def run_doctor(call: Call) -> Dict[str, Any]:
    """Gather the facts.

    The request may name ``models`` (folders), ``ports``, ``units``, ``folders``, ``environment_files`` and
    ``secrets_files`` (paths), ``environment`` (what the service runs with), ``paths`` (files of patch sets, for
    the status), and ``deep`` (see :func:`doctor_deep.gather`).
    """
    request, started = call.request, time.monotonic()
    root, why = doctor_python.find_root(request)
    packages = doctor_python.Packages(doctor_python.folders_of(root))
    environment = {str(name): str(value) for name, value in (request.get("environment") or {}).items()}
    models = [str(path) for path in request.get("models") or []]
    actions = {
        "gpu": doctor_gpu.gather,
        "host": functools.partial(doctor_host.gather, request, _folders(request, root)),
        "bus": doctor_host.gather_bus,
        "python": functools.partial(doctor_python.gather_python, root),
        "engine": functools.partial(_engine, root, why),
        "packages": functools.partial(doctor_python.gather_packages, packages),
        "cuda": functools.partial(_cuda, packages, environment),
        "toolkit": functools.partial(_toolkit, packages, environment),
        "models": functools.partial(_each, doctor_models.gather, models, _MODEL_SECONDS),
        "units": functools.partial(doctor_units.gather, [str(name) for name in request.get("units") or []]),
        "files": functools.partial(_files, request),
        "status": functools.partial(_status, call, why),
    }
    done: List[str] = []

    def tell(name: str) -> None:
        done.append(name)
        call.progress(len(done), len(actions), name)

    facts = together(actions, _SECONDS, tell)
    facts["deep"] = None
    if request.get("deep"):
        call.progress(0, 0, "deep checks")
        path = [root.site] if root else []
        facts["deep"] = together({"deep": functools.partial(doctor_deep.gather, request, facts["gpu"], path)}, 900)[
            "deep"
        ]
    facts["agent"] = {"uid": os.geteuid(), "user": _user(), "seconds": round(time.monotonic() - started, 3)}
    return facts


def _engine(root: Optional[Root], why: Optional[str]) -> Fact:
    return {"error": why} if root is None else doctor_python.gather_engine(root)


def _status(call: Call, why: Optional[str]) -> Fact:
    if why is not None:
        return {"error": why}
    try:
        return standing.run_status(call)
    except AgentError as error:
        return {"error": str(error)}


def _cuda(packages: doctor_python.Packages, environment: Dict[str, str]) -> Fact:
    torch = doctor_cuda.gather_torch(packages)
    path = environment.get("LD_LIBRARY_PATH", os.environ.get("LD_LIBRARY_PATH", ""))
    kernels = doctor_cuda.gather_kernels(packages, torch, [part for part in path.split(":") if part])
    return {"torch": torch, **kernels}


def _toolkit(packages: doctor_python.Packages, environment: Dict[str, str]) -> Fact:
    return doctor_cuda.gather_toolkit(packages, environment, sys.prefix)


def _each(look: Any, paths: List[str], seconds: float) -> Fact:
    return together({path: functools.partial(look, path) for path in paths}, seconds)


def _files(request: Dict[str, Any]) -> Fact:
    found = {}
    for key, secret in (("environment_files", False), ("secrets_files", True)):
        for path in request.get(key) or []:
            found[str(path)] = doctor_units.environment_file(str(path), secret)
    return found


def _folders(request: Dict[str, Any], root: Optional[Root]) -> List[str]:
    """The folders whose space and mount matter: where things are unpacked, compiled and cached."""
    asked = [str(path) for path in request.get("folders") or []]
    own = [tempfile.gettempdir(), "/var/cache", *([root.site] if root else [])]
    return list(dict.fromkeys([*own, *asked]))


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
