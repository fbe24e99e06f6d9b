"""Build the argument parser of a wheel by running the engine's own code, everything else stubbed; print it as JSON.

python real_parser.py WHEEL

The modules that declare arguments are the wheel's, imported from the archive; torch, transformers and the rest of the
engine are stand-ins whose every attribute is a class without content.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types

REAL = (
    "sglang.srt.server_args",
    "sglang.srt.arg_groups",
    "sglang.srt.function_call.parser_names",
    "sglang.srt.parser.reasoning_parser_names",
    "sglang.srt.environ",
)
STUBBED = (
    "sglang", "torch", "numpy", "transformers", "huggingface_hub", "orjson", "zmq", "requests", "psutil", "pybase64",
    "IPython", "triton", "fastapi", "pydantic", "safetensors", "PIL", "packaging", "uvicorn",
)  # fmt: skip


class Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub

    def __iter__(cls):
        return iter(())

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __add__(cls, other):
        return other

    __radd__ = __add__

    def keys(cls):
        return []


class Stub(metaclass=Meta):
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return Stub

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub

    def __class_getitem__(cls, item):
        return cls


class StubModule(types.ModuleType):
    __all__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, wheel):
        self.wheel = wheel

    def find_spec(self, name, path, target=None):
        if any(name == real or name.startswith(real + ".") for real in REAL):
            return None
        if name.partition(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = StubModule(spec.name)
        module.__path__ = [f"{self.wheel}/{spec.name.replace('.', '/')}"] if spec.name.startswith("sglang") else []
        return module

    def exec_module(self, module):
        pass


def main(wheel: str) -> None:
    sys.path.insert(0, wheel)
    sys.meta_path.insert(0, Finder(wheel))
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    flags = [
        {
            "names": action.option_strings,
            "nargs": action.nargs,
            "type": getattr(action.type, "__name__", None) if action.type else "str",
            "choices": None if action.choices is None else sorted(str(choice) for choice in action.choices),
            "default": repr(action.default),
            "required": action.required,
            "deprecated": type(action).__name__.startswith("Deprecated"),
        }
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    ]
    json.dump(flags, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
