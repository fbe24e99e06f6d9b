"""The engine's source in versions other than the one that most tests run, as published and with dflash-fixes."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from ddtree_deploy.authoring.stack import stack_of
from ddtree_deploy.patching.patchset import load_closure
from ddtree_deploy.resources import patches_dir


def fixed_files(version: str, tree: Mapping[str, bytes]) -> dict[str, bytes]:
    """Path -> content of every file that dflash-fixes changes on a version, hashes checked."""
    stack = stack_of(load_closure("dflash-fixes", patches_dir()), version, tree)
    return {path: data for path in stack.family.paths if (data := stack.final(path)) is not None}


def small_site(folder: Path, files: Mapping[str, bytes]) -> Path:
    """A site with these files alone."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def method(source: bytes, class_name: str, name: str, provided: Mapping[str, object]) -> object:
    """One method of the source as a plain function, with ``provided`` for the module's names."""
    tree = ast.parse(source)
    owner = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == class_name)
    found = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name)
    annotations = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([annotations, found], []))
    namespace = dict(provided)
    exec(compile(module, f"{class_name}.{name}", "exec"), namespace)
    return namespace[name]


def settings(interval: int) -> dict[str, object]:
    """What the versions ask for the track interval by."""
    args = SimpleNamespace(mamba_track_interval=interval)
    return {
        "get_global_server_args": lambda: args,
        "get_server_args": lambda: args,
        "get_exec": lambda: SimpleNamespace(mamba=args),
        "mamba_track_grid": lambda page_size: interval,
    }
