"""Compile DDTree's kernels to machine code, without a GPU.

    tree_compile.py FOLDER < '[{"module": "ddtree_kernels", "kernel": "walk_tree_kernel", "arch": 90,
                               "signature": {...}, "constexprs": {...}, "num_warps": 1}]'

FOLDER is what the patch set adds to a site. `signature` names the type of every argument of the kernel that is not
in `constexprs`. Prints, for each, {"registers", "spilled"}: what ptxas says of the code that it made, per thread.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

MODULES = "sglang/srt/speculative"
# sm_120's generic code is what runs; sm_90's needs the suffix for what Triton emits.
SUFFIX = {90: "sm_90a", 120: "sm_120a"}


@functools.cache
def load(folder: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, folder / MODULES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def assemble(ptx: str, arch: int) -> dict[str, int]:
    """What Triton's ptxas reports for a kernel."""
    ptxas = next((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        done = subprocess.run(
            [ptxas, "-v", f"-arch={SUFFIX[arch]}", source, "-o", Path(folder, "kernel.cubin")],
            check=True,
            capture_output=True,
            text=True,
        )
    said = done.stderr + done.stdout
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": sum(int(count) for count in re.findall(r"(\d+) bytes spill", said)),
    }


def compile_kernel(folder: Path, job: dict) -> dict[str, int]:
    kernel = getattr(load(folder, job["module"]), job["kernel"])
    constexprs = job["constexprs"]
    signature = {name: "constexpr" if name in constexprs else job["signature"][name] for name in kernel.arg_names}
    # Tables are aligned at run time.
    aligned = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(signature.values()) if kind.startswith("*")}
    built = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned),
        target=GPUTarget("cuda", job["arch"], 32),
        options={"num_warps": job["num_warps"]},
    )
    assert built.asm["cubin"]
    return assemble(built.asm["ptx"], job["arch"])


def main() -> None:
    folder = Path(sys.argv[1])
    print(json.dumps([compile_kernel(folder, job) for job in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
