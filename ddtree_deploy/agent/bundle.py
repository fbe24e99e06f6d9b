"""Packs the agent's modules into what is sent on the host interpreter's stdin (client side only)."""

from __future__ import annotations

import functools
import zlib
from importlib import resources

_SITE = ("records", "state", "processes", "layers", "site")
_STANDING = ("tree", "root", *_SITE, "standing")
_TRANSACT = ("tree", "root", *_SITE, "commit", "transact")
_UNITS = (
    "tree",
    "root",
    *_SITE,
    "commit",
    "managers",
    "supervised",
    "supervisor",
    "unitfiles",
    "installation",
    "install",
)
_SERVE = (*_UNITS, "endpoint", "serving")
_DOCTOR = tuple(
    "doctor_" + name
    for name in ("probe", "elf", "gpu", "python", "cuda", "host", "models", "units", "rank", "deep", "facts")
)
_MODULES = {
    "facts": ("tree", "root"),
    "snapshot": ("tree", "root", "walk", "manifest"),
    "grep": ("tree", "root", "walk", "selection", "literals", "grep", "search"),
    "find_def": ("tree", "root", "walk", "selection", "definitions", "search"),
    "plan": _STANDING,
    "status": ("tree", "root", "walk", "manifest", "baseline", *_SITE, "standing"),
    "stored": _STANDING,
    "apply": _TRANSACT,
    "rollback": (*_TRANSACT, "rollback"),
    "recover": _TRANSACT,
    "outcome": _STANDING,
    "history": _STANDING,
    "units": _UNITS,
    "units_recover": _UNITS,
    "unit_look": _UNITS,
    "unit_install": _UNITS,
    "unit_restore": _UNITS,
    "unit_outcome": _UNITS,
    "unit_serve": _SERVE,
    "unit_log": _SERVE,
    "models": ("doctor_probe", "doctor_models", "models"),
    "doctor": ("tree", "root", "walk", "manifest", "baseline", *_SITE, "standing", *_DOCTOR),
}

_BOOT = """
import sys
if sys.version_info < (3, 8):
    sys.stderr.write("ddtree-agent: python %d.%d is too old, 3.8 or later is needed\\n" % sys.version_info[:2])
    sys.exit(9)
import types
class _Loader:
    def __init__(self, source): self.source = source
    def get_source(self, name): return self.source
_package = types.ModuleType("ddtree_agent")
_package.__path__ = []
sys.modules["ddtree_agent"] = _package
for _name, _source in SOURCES:
    _full = "ddtree_agent." + _name
    _module = types.ModuleType(_full)
    _module.__package__ = "ddtree_agent"
    _module.__file__ = _full
    _module.__loader__ = _Loader(_source)
    sys.modules[_full] = _module
    setattr(_package, _name, _module)
    exec(compile(_source, _full, "exec", dont_inherit=True), _module.__dict__)
sys.exit(sys.modules["ddtree_agent.main"].main(NONCE))
"""


@functools.cache
def _source(name: str) -> str:
    return resources.files("ddtree_deploy.agent").joinpath(name + ".py").read_text("utf-8")


def payload(operation: str, nonce: str, *, search: bool = False) -> bytes:
    """The bytes to write first: a decimal length line, then that many bytes of zlib-packed source.

    Only the modules that ``operation`` needs travel (with ``search`` what looks for the host's installs, too):
    compiling them is most of the agent's start-up.
    """
    modules = _MODULES[operation]
    names = ("protocol", "call", *modules, *(("discovery",) if search and "root" in modules else ()), "main")
    sources = [(name, _source(name)) for name in names]
    packed = zlib.compress(f"NONCE = {nonce!r}\nSOURCES = {sources!r}\n{_BOOT}".encode(), 6)
    return b"%d\n" % len(packed) + packed
