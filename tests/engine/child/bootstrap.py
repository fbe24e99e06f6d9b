"""Make the engine's own modules importable on a CPU: torch, triton and numpy are real, the rest is not.

The child process of an engine test imports this first. Third-party packages that the engine
names at import time and the code under test never calls are replaced by inert stand-ins, and
the package's `__init__` modules that pull in every model are bypassed. Triton runs interpreted.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from pathlib import Path

# Imported by the modules under test; never called by them.
INERT = (
    "IPython",
    "PIL",
    "aiohttp",
    "compressed_tensors",
    "cuda",
    "dill",
    "einops",
    "fastapi",
    "flashinfer",
    "gguf",
    "huggingface_hub",
    "msgspec",
    "openai",
    "orjson",
    "partial_json_parser",
    "psutil",
    "pybase64",
    "pydantic",
    "requests",
    "safetensors",
    "setproctitle",
    "sgl_kernel",
    "starlette",
    "torchcodec",
    "torchvision",
    "tqdm",
    "transformers",
    "vllm",
    "xgrammar",
    "zmq",
    "sglang.srt.utils.hf_transformers_utils",
)


class InertMeta(type):
    def __getattr__(cls, name: str) -> object:
        return inert_class(name)


def inert_class(name: str) -> type:
    """A class that can be subclassed, called, subscripted and used as a decorator, to no effect."""
    if name.startswith("__"):
        raise AttributeError(name)
    body = {
        "__init__": lambda self, *args, **kwargs: None,
        "__init_subclass__": classmethod(lambda cls, **kwargs: None),
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__call__": lambda self, *args, **kwargs: args[0] if len(args) == 1 and callable(args[0]) else None,
        "__getattr__": lambda self, key: inert_class(key),
    }
    return InertMeta(name, (object,), body)


class InertModule(types.ModuleType):
    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> object:
        return inert_class(name)


class InertFinder:
    def find_spec(self, name, path=None, target=None):
        if any(name == inert or name.startswith(inert + ".") for inert in INERT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return InertModule(spec.name)

    def exec_module(self, module):
        pass


def install(site: Path) -> None:
    """Let `import sglang.srt...` load from `site`, the folder that holds the package."""
    os.environ["TRITON_INTERPRET"] = "1"
    # Before the stand-ins: torch and triton look for optional packages themselves.
    import torch  # noqa: F401
    import triton  # noqa: F401

    patch_language_once()
    sys.meta_path.insert(0, InertFinder())
    for name, kind in (
        ("sglang", types.ModuleType),
        ("sglang.srt", types.ModuleType),
        ("sglang.srt.configs", InertModule),
    ):
        package = kind(name)
        package.__path__ = [str(site.joinpath(*name.split(".")))]
        sys.modules[name] = package
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, package)


def patch_language_once() -> None:
    """Halve the time of interpreted kernels.

    The interpreter makes Triton's language its own when a kernel starts and again at every call of a device
    function, of which reductions are made; the second time changes nothing.
    """
    from triton.runtime import interpreter

    patched: set[str] = set()

    def call(function: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        if function.fn.__module__ not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(function.fn.__module__)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def add_modules(folder: Path) -> None:
    """Let modules that a patch set adds be imported from `folder`, which is or is like the set's new/.

    They come before any that the site has, and before those of another such folder, imported or not.
    """
    import sglang.srt.speculative as package

    added = folder / "sglang" / "srt" / "speculative"
    package.__path__ = [str(added), *package.__path__]
    for file in added.glob("*.py"):
        sys.modules.pop(f"{package.__name__}.{file.stem}", None)
