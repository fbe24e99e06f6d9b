"""Checks of torch, the kernel wheels and the compilers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddtree_deploy.doctor.common import (
    BLACKWELL,
    capability,
    devices,
    dotted,
    options,
    plural,
    services,
    shown,
    some,
    torch_cuda,
    version,
)
from ddtree_deploy.doctor.facts import Facts, NotKnown
from ddtree_deploy.doctor.findings import Saying, check, error, note, warning

_ENGINE_KERNELS = ("sglang-kernel", "sgl-kernel")
_SHOWN = 3  # lines of evidence of one kind
_NVCC_FOR_SM12X = (12, 9)
_PTXAS_FOR_BLACKWELL = (12, 8)
# Libraries that CUDA versions by their major, such as libcudart.so.13.
_CUDA_LIBRARY = re.compile(r"^lib(?:cudart|nvrtc|cublas|cublasLt|cusparse|cusolver|nvJitLink)\.so\.(\d+)")
_DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
_SYSTEM_PACKAGES = {"libnuma.so.1": "numactl's libnuma (Debian: libnuma1)", "libibverbs.so.1": "libibverbs1"}


def _serving(facts: Facts) -> list[Facts]:
    """The kernel libraries that the engine would load on these GPUs; all where the GPUs are not known."""
    try:
        majors = {capability(device)[0] for device in devices(facts)}
    except NotKnown:
        majors = set()
    kernels = []
    for kernel in facts.at("cuda").items("kernels"):
        folder = re.search(r"(?:^|/)sm(\d+)/", kernel.text("path"))
        # The kernel package has a folder for compute capability 9 and one for all others.
        if folder and majors and (folder.group(1) == "90") != (majors == {9}):
            continue
        kernels.append(kernel)
    # The library that everything hangs on comes first.
    return sorted(kernels, key=lambda kernel: "common_ops" not in kernel.text("path"))


@check("DD220")
def torch_build(facts: Facts) -> Iterator[Saying]:
    torch = facts.at("cuda").at("torch")
    found = torch.maybe_text("version")
    if found is None:
        yield error("torch is not installed", mend="install the engine's requirements into its environment anew")
    elif torch.maybe_text("cuda") is None:
        yield error(
            f"torch {found} is built without CUDA",
            mend="install torch from the index of a CUDA build, such as https://download.pytorch.org/whl/cu130",
        )


@check("DD221")
def kernels_and_torch(facts: Facts) -> Iterator[Saying]:
    cuda = torch_cuda(facts)
    torch = facts.at("cuda").at("torch").maybe_text("version")
    if cuda is None or torch is None:
        return
    built: dict[tuple[str, int], list[str]] = {}
    for kernel in _serving(facts):
        libraries = [match for name in kernel.texts("needed") if (match := _CUDA_LIBRARY.match(name))]
        majors = {int(match.group(1)) for match in libraries}
        if majors and cuda[0] not in majors:
            needed = some(sorted(match.group() for match in libraries))
            line = f"{kernel.text('path')} needs {needed}"
            built.setdefault((kernel.text("distribution"), max(majors)), []).append(line)
    for (name, major), lines in built.items():
        yield error(
            f"{name} is built for CUDA {major}, torch for CUDA {shown(cuda)}",
            f"torch {torch}",
            *_first(lines),
            mend=f"install torch built for CUDA {major}, or the {name} built for CUDA {cuda[0]}",
        )


@check("DD222")
def shared_libraries(facts: Facts) -> Iterator[Saying]:
    places = facts.at("cuda").at("libraries")
    absent: dict[str, list[str]] = {}
    damaged: dict[str, list[str]] = {}
    for kernel in _serving(facts):
        name, path, why = kernel.text("distribution"), kernel.text("path"), kernel.maybe_text("error")
        if why is not None:
            damaged.setdefault(name, []).append(f"{path}: {why}")
            continue
        for library in kernel.texts("needed"):
            if not places.texts(library):
                absent.setdefault(library, []).append(f"{name} ({path}) needs it")
    for name, lines in damaged.items():
        yield error(
            f"{name}: {len(lines)} of its libraries damaged or gone",
            *_first(lines),
            mend=f"install it again: `pip install --force-reinstall --no-deps {name}==VERSION`",
        )
    for library, lines in absent.items():
        if library in _DRIVER_LIBRARIES:
            mend = "install the NVIDIA driver's libraries; in a container, run it with the GPUs given to it"
        elif library in _SYSTEM_PACKAGES:
            mend = f"install {_SYSTEM_PACKAGES[library]}"
        elif re.match(r"^lib(?:torch|c10)", library):
            mend = "install torch into the engine's environment"
        else:
            mend = "install the CUDA runtime packages that torch requires, of the same CUDA major"
        yield error(f"{library} is missing", *_first(lines), mend=mend)


def _first(lines: list[str]) -> list[str]:
    """The first few of the lines, and how many more there are."""
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return lines[:_SHOWN] + more


@check("DD223")
def binary_interface(facts: Facts) -> Iterator[Saying]:
    if torch_cuda(facts) is None:
        return  # DD220 says so
    unread: dict[str, list[str]] = {}
    foreign: dict[str, list[str]] = {}
    for kernel in _serving(facts):
        name, path, unresolved = kernel.text("distribution"), kernel.text("path"), kernel.maybe("unresolved")
        if unresolved is not None and unresolved.integer("count"):
            symbols = f"{plural(unresolved.integer('count'), 'symbol')} of {path} in no library of torch"
            foreign.setdefault(name, []).append(f"{symbols}, such as {some(unresolved.texts('first'), 2)}")
        elif unresolved is None and kernel.maybe_text("error") is None:
            unread.setdefault(name, []).append(path)
    for name, paths in unread.items():
        yield note(
            f"not known: whether {name} fits torch's binary interface",
            f"torch's libraries could not be read for {some(paths, 2)}",
        )
    for name, lines in foreign.items():
        yield error(
            f"{name} was built for another torch",
            *_first(lines),
            mend="install the torch version that this engine release requires, then the kernel wheel again",
        )


@check("DD224")
def machine_code(facts: Facts) -> Iterator[Saying]:
    found = sorted({capability(device) for device in devices(facts)})
    for kernel in _serving(facts):
        if kernel.text("distribution") not in _ENGINE_KERNELS or "common_ops" not in kernel.text("path"):
            continue
        architectures = kernel.at("architectures")
        binary, portable = architectures.integers("sm"), architectures.integers("ptx")
        if not binary and not portable:
            continue
        for major, minor in found:
            # Machine code runs on the same major from its minor on; PTX on everything later.
            runs = any(sm // 10 == major and sm % 10 <= minor for sm in binary)
            if not runs and not any(ptx <= major * 10 + minor for ptx in portable):
                yield error(
                    f"{kernel.text('distribution')} has no code for compute capability {major}.{minor}",
                    f"{kernel.text('path')} is built for {some([str(item) for item in binary + portable], 12)}",
                    mend="install a kernel wheel built for these GPUs",
                )


@check("DD225")
def two_kernels(facts: Facts) -> Iterator[Saying]:
    installed = facts.at("packages").words("installed")
    both = [name for name in _ENGINE_KERNELS if name in installed]
    if len(both) == 2:
        yield error(
            "sgl-kernel and sglang-kernel are both installed",
            "they write into the same package folder: what is there is a mixture",
            mend="uninstall both, then install the one that the engine requires",
        )


@check("DD226")
def flashinfer_parts(facts: Facts) -> Iterator[Saying]:
    installed = facts.at("packages").words("installed")
    main = installed.get("flashinfer-python")
    if main is None:
        return
    cubin, cache = installed.get("flashinfer-cubin"), installed.get("flashinfer-jit-cache")
    mend = "install flashinfer's packages of one version, as the engine requires it"
    if cubin is not None and cubin != main:
        yield error(f"flashinfer-cubin {cubin} beside flashinfer-python {main}", mend=mend)
    if cache is not None and not cache.startswith(main):
        yield error(f"flashinfer-jit-cache {cache} beside flashinfer-python {main}", mend=mend)


@check("DD227")
def engine_floors(facts: Facts) -> Iterator[Saying]:
    installed = facts.at("packages").words("installed")
    for floor in facts.at("engine").items("floors"):
        name, least = floor.text("package"), floor.text("minimum")
        found = installed.get(name)
        where = f"srt/entrypoints/engine.py, line {floor.integer('line')}, refuses less than {least}"
        if found is None:
            yield error(f"{name} is not installed", where, mend=f"install {name}=={least}")
        elif version(found, f"packages.installed.{name}") < version(least, f"{floor.path}.minimum"):
            yield error(f"{name} {found} is too old", where, mend=f"install {name}=={least}")


@check("DD228")
def nvcc(facts: Facts) -> Iterator[Saying]:
    cache = facts.at("packages").words("installed").get("flashinfer-jit-cache")
    blackwell = any(capability(device)[0] == 12 for device in devices(facts))
    toolkit = facts.at("toolkit")
    used = _jit_users(facts)
    severe = error if used and cache is None else warning
    who = f"{some(used)} use flashinfer's kernels" if used else "flashinfer's kernels are compiled at run time"
    if toolkit.maybe_flag("cuda_home_there") is False:
        yield severe(
            f"CUDA_HOME is {toolkit.maybe_text('cuda_home')}, which is not there",
            who,
            mend="set `cuda_home` of the service to the toolkit's folder",
        )
    compiler = toolkit.maybe("nvcc")
    if compiler is None:
        yield severe(
            "nvcc is not there",
            who,
            mend="install the CUDA toolkit of torch's CUDA version and set `cuda_home`, or install "
            "flashinfer-jit-cache",
        )
        return
    found = dotted(compiler.text("version"), f"{compiler.path}.version")
    if blackwell and found < _NVCC_FOR_SM12X:
        yield severe(
            f"nvcc {shown(found)} does not know compute capability 12.0",
            f"{compiler.text('path')}; flashinfer needs {shown(_NVCC_FOR_SM12X)} for it, and says that no supported "
            "architecture was found",
            mend="install a newer CUDA toolkit and set `cuda_home`",
        )
    cuda = torch_cuda(facts)
    if cuda is not None and found[0] != cuda[0]:
        yield warning(
            f"nvcc is of CUDA {shown(found)}, torch of CUDA {shown(cuda)}",
            f"{compiler.text('path')}; what it compiles is loaded beside torch's runtime",
            mend=f"install the toolkit of CUDA {cuda[0]} and set `cuda_home`",
        )


def _jit_users(facts: Facts) -> list[str]:
    names = ("--attention-backend", "--speculative-draft-attention-backend", "--moe-runner-backend")
    used = []
    for service in services(facts):
        values = [options(service, facts).get(name) for name in names]
        if any(value and value.startswith("flashinfer") for value in values) or values[0] is None:
            used.append(service.name)
    return used


@check("DD229")
def build_tools(facts: Facts) -> Iterator[Saying]:
    toolkit = facts.at("toolkit")
    if toolkit.maybe("compiler") is None:
        yield warning("no C++ compiler is there", "kernels are compiled at run time", mend="install g++")
    if toolkit.maybe("ninja") is None:
        yield warning(
            "ninja is not there", "kernels are compiled at run time", mend="install ninja into the environment"
        )


@check("DD230")
def triton_ptxas(facts: Facts) -> Iterator[Saying]:
    if not any(capability(device)[0] in BLACKWELL for device in devices(facts)):
        return
    ptxas = facts.at("toolkit").maybe("ptxas")
    if ptxas is None:
        return
    found = dotted(ptxas.text("version"), f"{ptxas.path}.version")
    if found < _PTXAS_FOR_BLACKWELL:
        yield error(
            f"triton's ptxas {shown(found)} does not know the GPUs",
            f"{ptxas.text('path')}; it ends with: Value 'sm_120' is not defined for option 'gpu-name'",
            mend="unset TRITON_PTXAS_PATH, and install the triton that torch requires",
        )
