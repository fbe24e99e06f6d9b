"""The CUDA stack below the engine: torch's build, the kernel wheels' libraries, compilers. Files are read, not run."""

from __future__ import annotations

import functools
import os
import re
from typing import Dict, List, Optional, Set

from .doctor_elf import Elf, ElfError
from .doctor_probe import Fact, find_program, listing, read, run, together, version_in
from .doctor_python import Packages

# Distributions that bring machine code which has to agree with torch and CUDA.
KERNEL_DISTRIBUTIONS = (
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "flashinfer-jit-cache",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "sgl-deep-ep",
    "torchvision",
    "torchaudio",
)
_MAX_LIBRARIES = 60  # a distribution
_TORCH_SYMBOL = re.compile(rb"^_Z(?:T[ISV]|NK?|K)?N?K?(?:3c10|2at|5torch|6caffe2)")
_TORCH_LIBRARIES = ("libc10.so", "libc10_cuda.so", "libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so")
_SECONDS = 10.0


def gather_torch(packages: Packages) -> Fact:
    """``version`` and ``cuda`` (None: built without) as torch's version module has them, and its library folder."""
    for folder in packages.folders:
        text = read(os.path.join(folder, "torch", "version.py"))
        if text is None:
            continue
        return {
            "version": version_in(text, r"""(?m)^__version__\s*(?::[^=]+)?=\s*['"]([^'"]+)['"]"""),
            "cuda": version_in(text, r"""(?m)^cuda\s*(?::[^=]+)?=\s*['"]([^'"]+)['"]"""),
            "folder": os.path.join(folder, "torch"),
        }
    return {"version": None, "cuda": None, "folder": None}


def gather_kernels(packages: Packages, torch: Fact, library_path: List[str]) -> Fact:
    """``kernels``: each library of the kernel wheels; ``libraries``: where each that they need was found."""
    kernels, needed = [], set()
    for name in KERNEL_DISTRIBUTIONS:
        # Libraries that a wheel brings along for itself are not kernels.
        shared = [path for path in packages.record(name) if re.search(r"^(?!.*\.libs/).*\.so(\.\d+)*$", path)]
        for path in shared[:_MAX_LIBRARIES]:
            kernel = _kernel(name, packages.place(name), path)
            kernels.append(kernel)
            needed |= set(kernel["needed"])
    if torch["folder"]:
        _resolve_symbols(kernels, os.path.join(torch["folder"], "lib"))
    for kernel in kernels:
        kernel.pop("_wanted", None)
        kernel.pop("_path", None)
    return {"kernels": kernels, "libraries": _locate(needed, packages.folders, kernels, library_path)}


def _kernel(distribution: str, place: str, path: str) -> Fact:
    full = os.path.normpath(os.path.join(place, path))
    kernel: Fact = {
        "distribution": distribution,
        "path": path,
        "error": None,
        "needed": [],
        "runpath": [],
        "architectures": {"sm": [], "ptx": []},
        "unresolved": None,
        "_path": full,
        "_wanted": set(),
    }
    try:
        with Elf(full) as elf:
            dynamic = elf.dynamic()
            kernel["needed"], kernel["runpath"] = dynamic["needed"], dynamic["runpath"]
            kernel["architectures"] = elf.architectures()
            kernel["_wanted"] = {name for name in elf.symbols()[0] if _TORCH_SYMBOL.match(name)}
    except (ElfError, OSError) as error:
        kernel["error"] = getattr(error, "strerror", None) or str(error)
    return kernel


def _resolve_symbols(kernels: List[Fact], folder: str) -> None:
    """Fill in ``unresolved``: how many of a kernel's torch symbols no library of torch defines, and the first."""
    wanted: Set[bytes] = set().union(*(kernel["_wanted"] for kernel in kernels)) if kernels else set()
    defined: Set[bytes] = set()
    read_any = False
    for name in _TORCH_LIBRARIES if wanted else ():
        try:
            with Elf(os.path.join(folder, name)) as elf:
                defined |= elf.symbols(wanted)[1]
                read_any = True
        except (ElfError, OSError):
            if name == "libtorch_cpu.so":
                return  # without the largest of them nothing can be said
    for kernel in kernels:
        if kernel["error"] is None and (read_any or not kernel["_wanted"]):
            missing = sorted(symbol.decode("ascii", "replace") for symbol in kernel["_wanted"] - defined)
            kernel["unresolved"] = {"count": len(missing), "first": missing[:3]}


def _locate(needed: Set[str], folders: List[str], kernels: List[Fact], library_path: List[str]) -> Dict[str, List[str]]:
    """Library name -> the places that have it, those of the environment first; an empty list is a missing one."""
    places: Dict[str, List[str]] = {name: [] for name in sorted(needed)}
    for folder in folders:
        below = [os.path.join(folder, "torch", "lib")]
        below += [os.path.join(folder, name) for name in listing(folder) if name.endswith(".libs")]
        for kernel in kernels:
            origin = os.path.join(folder, os.path.dirname(kernel["path"]))
            paths = [part.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for part in kernel["runpath"]]
            below += [os.path.normpath(path) for path in (origin, *paths) if os.path.isabs(path)]
        for vendor in listing(os.path.join(folder, "nvidia")):
            below.append(os.path.join(folder, "nvidia", vendor, "lib"))
        for place in dict.fromkeys(below):
            for name in places.keys() & set(listing(place)):
                if os.path.isfile(os.path.join(place, name)):
                    places[name].append("site:" + os.path.relpath(os.path.join(place, name), folder))
    for place in library_path:
        for name in places.keys() & set(listing(place)):
            places[name].append("path:" + os.path.join(place, name))
    for name, path in _loader_cache().items():
        if name in places:
            places[name].append("system:" + path)
    return places


def _loader_cache() -> Dict[str, str]:
    program = find_program("ldconfig")
    answer = run([program, "-p"], _SECONDS) if program else {"out": ""}
    found: Dict[str, str] = {}
    for line in answer["out"].splitlines():
        match = re.match(r"^\s+(\S+) \(([^)]*)\) => (\S+)$", line)
        if match and "x32" not in match.group(2):
            found.setdefault(match.group(1), match.group(3))
    return found


def gather_toolkit(packages: Packages, environment: Dict[str, str], prefix: str) -> Fact:
    """Compilers that kernels are built with at run time, looked for as flashinfer and triton look for them."""
    path = os.path.join(prefix, "bin") + os.pathsep + environment.get("PATH", os.environ.get("PATH", ""))
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = os.path.join(home, "bin", "nvcc") if home else None
    if nvcc is None or not os.path.isfile(nvcc):
        nvcc = find_program("nvcc", path) or "/usr/local/cuda/bin/nvcc"
    triton = [os.path.join(folder, "triton", "backends", "nvidia", "bin", "ptxas") for folder in packages.folders]
    ptxas = environment.get("TRITON_PTXAS_PATH") or next((item for item in triton if os.path.isfile(item)), None)
    programs = {
        "nvcc": nvcc if os.path.isfile(nvcc) else None,
        "ptxas": ptxas,
        "compiler": find_program(environment.get("CXX") or "g++", path),
        "ninja": find_program("ninja", path),
    }
    facts = together({name: functools.partial(_version, program) for name, program in programs.items()}, _SECONDS + 5)
    return {"cuda_home": home, "cuda_home_there": None if home is None else os.path.isdir(home), **facts}


def _version(program: Optional[str]) -> Optional[Fact]:
    """``path`` and ``version`` of a compiler; None where it is not there, version None where it does not run."""
    if program is None:
        return None
    answer = run([program, "--version"], _SECONDS)
    said = answer["out"] + answer["err"]
    version = version_in(said, r"release (\d+\.\d+)") or version_in(said, r"(\d+\.\d+(?:\.\d+)*)")
    return {"path": program, "version": version, "error": answer["error"]}
