"""Execute one of the engine's modules with stand-ins for all that it imports: no torch, no GPU."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Mapping
from pathlib import Path

from tests.engine.child.bootstrap import InertModule


def execute(path: Path, provided: Mapping[str, Mapping[str, object]]) -> types.ModuleType:
    """The module of the source at `path`.

    `provided` says what imported modules hold: module name -> names. Any other name from a module
    outside of the standard library is an inert class.
    """

    def stand_in(name: str) -> types.ModuleType:
        module = InertModule(name)
        module.__dict__.update(provided.get(name, {}))
        return module

    def fake_import(name, globals_=None, locals_=None, fromlist=(), level=0):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names:
            return builtins.__import__(name, globals_, locals_, fromlist, level)
        return stand_in(name if fromlist else top)

    module = types.ModuleType(f"engine_source_{path.stem}")
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": fake_import}
    # dataclasses look their module up while they are being made.
    sys.modules[module.__name__] = module
    try:
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module
