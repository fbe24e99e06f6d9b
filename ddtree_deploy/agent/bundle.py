"""Packs the agent's modules into what is sent on the host interpreter's stdin (client side only)."""

from __future__ import annotations

import functools
import zlib
from importlib import resources

_TRANSACT = ("root", "tree", "records", "state", "processes", "commit", "transact")
_MODULES = {
    "facts": ("root",),
    "snapshot": ("root", "tree", "walk", "manifest"),
    "grep": ("root", "tree", "walk", "selection", "literals", "grep", "search"),
    "find_def": ("root", "tree", "walk", "selection", "definitions", "search"),
    "plan": _TRANSACT,
    "status": ("root", "tree", "walk", "manifest", *_TRANSACT[2:]),
    "apply": _TRANSACT,
    "rollback": _TRANSACT,
    "recover": _TRANSACT,
    "outcome": _TRANSACT,
    "history": _TRANSACT,
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


def payload(operation: str, nonce: str) -> bytes:
    """The bytes to write first: a decimal length line, then that many bytes of zlib-packed source.

    Only the modules that ``operation`` needs travel: compiling them is most of the agent's start-up.
    """
    names = ("protocol", "call", *_MODULES[operation], "main")
    sources = [(name, _source(name)) for name in names]
    packed = zlib.compress(f"NONCE = {nonce!r}\nSOURCES = {sources!r}\n{_BOOT}".encode(), 6)
    return b"%d\n" % len(packed) + packed
