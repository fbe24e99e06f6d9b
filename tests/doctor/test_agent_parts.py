"""The agent's looks at a host, one by one: bounded, and a failure is a fact."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from ddtree_deploy.agent import (
    doctor_cuda,
    doctor_gpu,
    doctor_host,
    doctor_models,
    doctor_probe,
    doctor_python,
    doctor_units,
)
from ddtree_deploy.doctor.checks import models
from ddtree_deploy.doctor.facts import Facts
from ddtree_deploy.launch import legality
from tests.doctor.cases import FOLDER
from tests.doctor.elf_builder import shared_object

PYTHON = sys.executable


# probe


def test_a_command_and_its_answer():
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert doctor_probe.run([PYTHON, "-c", script], 20) == {"status": 3, "out": "out\n", "err": "err\n", "error": None}


def test_a_program_that_is_not_there():
    answer = doctor_probe.run(["/no/such/program"], 5)
    assert answer["status"] is None
    assert "No such file" in answer["error"]


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path):
    (tmp_path / "child.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    (tmp_path / "parent.py").write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, {str(tmp_path / 'child.py')!r}])\n"
    )
    answer = doctor_probe.run([PYTHON, str(tmp_path / "parent.py")], 2)
    assert answer["error"] == "no answer within 2 s"
    child = (tmp_path / "pid").read_text()
    for _attempt in range(100):
        # Killed it may still wait to be collected.
        if not Path(f"/proc/{child}").exists() or ") Z " in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.05)
    pytest.fail("the child lives on")


def test_a_command_that_says_too_much():
    answer = doctor_probe.run([PYTHON, "-c", "while True: print('x' * 1000)"], 20, limit=10_000)
    assert answer["error"] == "more than 10000 bytes"
    assert len(answer["out"]) == 10_000


def test_a_command_that_closes_its_output_and_stays():
    answer = doctor_probe.run([PYTHON, "-c", "import os, time; os.close(1); os.close(2); time.sleep(600)"], 2)
    assert answer["error"] == "no end within 2 s"


def test_looks_that_fail_or_hang_do_not_hold_up_the_others():
    import threading

    def fail():
        raise OSError("broken")

    never = threading.Event()
    seen = []
    answers = doctor_probe.together({"fail": fail, "hang": never.wait, "well": lambda: 1}, 0.5, seen.append)
    never.set()
    assert answers == {"fail": {"error": "OSError: broken"}, "hang": {"error": "no answer within 0.5 s"}, "well": 1}
    assert sorted(seen) == ["fail", "well"]


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["x", "--api-key", "s3"], ["x", "--api-key", "***"]),
        (["x", "--api-key=s3", "--port", "1"], ["x", "--api-key=***", "--port", "1"]),
        (["x", "--admin-api-key", "s3", "s4"], ["x", "--admin-api-key", "***", "s4"]),
        (["x", "--ssl-keyfile-password", "s3"], ["x", "--ssl-keyfile-password", "***"]),
        (["x", "--hf-token", "s3"], ["x", "--hf-token", "***"]),
        (["x", "--api", "s3"], ["x", "--api", "***"]),
        (["x", "--max-total-tokens", "4"], ["x", "--max-total-tokens", "4"]),
        (["x", "--tokenizer-path", "/t"], ["x", "--tokenizer-path", "/t"]),
    ],
)
def test_secrets_on_a_command_line_are_masked(argv, shown):
    assert doctor_probe.mask(argv) == shown


# gpu


def sample(name: str) -> str:
    return (FOLDER / "smi" / name).read_text()


def test_devices_as_nvidia_smi_lists_them():
    one, two = doctor_gpu.rows(sample("rtx.csv"), {**doctor_gpu._CORE, **doctor_gpu._MORE})
    assert (one["capability"], one["memory_mib"], one["pcie_width"], one["driver"]) == ("12.0", 97887, 16, "580.95.05")
    assert (one["mig"], two["serial"], two["ecc_uncorrected"], two["power_limit_w"]) == (None, None, None, None)
    assert (two["compute_mode"], two["index"]) == ("Exclusive_Process", 1)


def test_a_device_of_an_old_driver_has_every_field():
    text = sample("rtx.csv").splitlines()[0].split(", [N/A]")[0]
    (device,) = doctor_gpu.rows(text, doctor_gpu._CORE)
    assert device["persistence"] is None
    assert set(device) == {name for name, _kind in (*doctor_gpu._CORE.values(), *doctor_gpu._MORE.values())}


def test_tables_of_links():
    assert doctor_gpu.matrix(sample("topo.txt")) == {"GPU0": {"GPU1": "SYS"}, "GPU1": {"GPU0": "SYS"}}
    assert doctor_gpu.matrix(sample("p2p.txt")) == {"GPU0": {"GPU1": "CNS"}, "GPU1": {"GPU0": "OK"}}
    assert doctor_gpu.matrix("no table") is None


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("GPU01\t \nXSYOK,[N/A]\x1b[4m")))
def test_any_table_is_read_or_is_none(text):
    table = doctor_gpu.matrix(text)
    assert table is None or all(isinstance(row, dict) for row in table.values())
    doctor_gpu.rows(text, doctor_gpu._CORE)


# host


def config_space(*capabilities: tuple[int, int]) -> bytes:
    space = bytearray(4096)
    at = 256
    for number, (kind, control) in enumerate(capabilities):
        following = 256 + 64 * (number + 1) if number + 1 < len(capabilities) else 0
        struct.pack_into("<IHH", space, at, kind | 1 << 16 | following << 20, 0x7F, control)
        at = following
    return bytes(space)


def test_access_control_of_a_bridge():
    assert doctor_host.acs_control(config_space((0x1, 0), (0xD, 0x1D))) == 0x1D
    assert doctor_host.acs_control(config_space((0x1, 0))) == 0
    assert doctor_host.acs_control(bytes(4096)) == 0
    assert doctor_host.acs_control(bytes(256)) is None
    looping = bytearray(config_space((0x1, 0)))
    struct.pack_into("<I", looping, 256, 0x1 | 256 << 20)
    assert doctor_host.acs_control(bytes(looping)) == 0


def test_a_port_and_who_listens():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert doctor_host._listener(port) is None
        listener.listen()
        found = doctor_host._listener(port)
    assert (found["address"], found["pid"]) == ("127.0.0.1", os.getpid())


def test_a_folder_that_is_not_there_yet(tmp_path):
    found = doctor_host._folder(str(tmp_path / "a" / "b"))
    assert (found["there"], found["writable"]) == (False, True)
    assert found["free"] > 0


# models


def safetensors(tensors: dict[str, int], *, cut: int = 0, header: bytes | None = None) -> bytes:
    table, end = {"__metadata__": {"format": "pt"}}, 0
    for name, size in tensors.items():
        table[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(table).encode() if header is None else header
    data = struct.pack("<Q", len(head)) + head + bytes(end)
    return data[: len(data) - cut]


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["X"]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(safetensors({"one": 10, "two": 20}))
    (folder / "b.safetensors").write_bytes(safetensors({"three": 5}))
    placed = {"one": "a.safetensors", "two": "a.safetensors", "three": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 35}, "weight_map": placed})
    )
    return folder


def test_a_whole_model(tmp_path):
    found = doctor_models.gather(str(make_model(tmp_path / "m")))
    assert found["config"] == {"architectures": ["X"]}
    assert found["index"] == {
        "shards": ["a.safetensors", "b.safetensors"],
        "tensors": 3,
        "lost": {"count": 0, "first": []},
        "total_size": 35,
    }
    assert all(file["size"] == file["expected"] and file["error"] is None for file in found["weights"].values())
    assert (found["tokenizer"], found["dangling"], found["there"]) == (True, [], True)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "is a git-lfs pointer, not the weights",
        ),
        (b"", "has no whole header"),
        (b"\x09" + bytes(7), "has no whole header"),
        (struct.pack("<Q", 2**63) + b"{}", "has no whole header"),
        (safetensors({}, header=b"[1, 2]"), "has a damaged header"),
        (safetensors({}, header=b'{"a": {"data_offsets": 3}}'), "has a damaged header"),
        (safetensors({}, header=b"\xff\xfe{}"), "has a damaged header"),
        (safetensors({}, header=b"[" * 5000), "has a damaged header"),
    ],
)
def test_weights_that_are_none(tmp_path, data, error):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    facts, names = doctor_models.weights(str(path))
    assert (facts["error"], names) == (error, [])


@settings(max_examples=80, deadline=None)
@given(data=st.binary(max_size=64) | st.builds(lambda body: safetensors({}, header=body), st.binary(max_size=40)))
def test_any_bytes_are_weights_or_a_fault(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    facts, _names = doctor_models.weights(str(path))
    assert (facts["error"] is None) == (facts["expected"] is not None)


def test_a_cut_file_and_a_lost_tensor(tmp_path):
    folder = make_model(tmp_path / "m")
    (folder / "a.safetensors").write_bytes(safetensors({"one": 10}, cut=4))
    found = doctor_models.gather(str(folder))
    assert found["weights"]["a.safetensors"]["expected"] == found["weights"]["a.safetensors"]["size"] + 4
    assert found["index"]["lost"] == {"count": 1, "first": ["two"]}


def test_a_link_that_leads_nowhere(tmp_path):
    folder = make_model(tmp_path / "m")
    (folder / "c.safetensors").symlink_to(tmp_path / "gone")
    found = doctor_models.gather(str(folder))
    assert found["dangling"] == ["c.safetensors"]
    assert "c.safetensors" not in found["weights"]


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{", "version https://git-lfs.github.com/spec/v1\n"])
def test_a_config_that_is_none(tmp_path, text):
    folder = make_model(tmp_path / "m")
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors.index.json").write_text(text)
    found = doctor_models.gather(str(folder))
    assert (found["config"], found["index"]) == (None, None)
    assert found["config_error"]
    assert found["index_error"]


# packages and kernels


def distribution(site: Path, name: str, version: str, requires=(), files=()) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n\nRequires-Dist: not-a-header\n")
    (info / "RECORD").write_text("".join(f"{path},sha256=x,1\n" for path in files))


def test_requirements_are_followed_and_extras_with_them(tmp_path):
    distribution(
        tmp_path, "sglang", "0.5.11", ["Foo_bar[cu13]>=1", "gone; extra == 'test'", "later; python_version < '3'"]
    )
    distribution(tmp_path, "foo-bar", "1.0", ["inner; extra == 'cu13'", "unwanted; extra == 'cu12'"])
    distribution(tmp_path, "inner", "2.0", ["sglang"])
    found = doctor_python.gather_packages(doctor_python.Packages([str(tmp_path)]))
    assert found["installed"] == {"sglang": "0.5.11", "foo-bar": "1.0", "inner": "2.0"}
    assert found["requires"] == {
        "sglang": ["Foo_bar[cu13]>=1", "later; python_version < '3'"],
        "foo-bar": ["inner; extra == 'cu13'"],
        "inner": ["sglang"],
    }


def test_two_versions_of_a_distribution(tmp_path):
    distribution(tmp_path, "torch", "2.9.1")
    distribution(tmp_path, "torch", "2.11.0")
    found = doctor_python.gather_packages(doctor_python.Packages([str(tmp_path)]))
    assert found["twice"] == [{"name": "torch", "versions": ["2.11.0", "2.9.1"]}]


def test_distributions_of_the_older_kind(tmp_path):
    (tmp_path / "PyYAML-6.0-py3.12.egg-info").write_text("Name: PyYAML\n")
    (tmp_path / "old_one-1.2.egg-info").mkdir()
    (tmp_path / "old_one-1.2.egg-info" / "PKG-INFO").write_text("Name: old-one\nRequires-Dist: x\n\n")
    packages = doctor_python.Packages([str(tmp_path)])
    assert {name: version for name, (version, _folder) in packages.found.items()} == {"pyyaml": "6.0", "old-one": "1.2"}
    assert packages.metadata("old-one") == "Name: old-one\nRequires-Dist: x"


def test_the_first_folder_wins(tmp_path):
    distribution(tmp_path / "a", "torch", "2.9.1")
    distribution(tmp_path / "b", "torch", "2.11.0")
    packages = doctor_python.Packages([str(tmp_path / "a"), str(tmp_path / "b")])
    assert packages.found["torch"][0] == "2.9.1"


def test_floors_are_read_off_the_syntax_tree(tmp_path):
    path = tmp_path / "engine.py"
    path.write_text('if x:\n    assert_pkg_version("Flash_Infer", "0.6", "m")\nassert_pkg_version(name, "1")\n')
    assert doctor_python.floors(str(path)) == [{"package": "flash-infer", "minimum": "0.6", "line": 2}]
    path.write_text("def (")
    assert doctor_python.floors(str(path)) is None
    assert doctor_python.floors(str(tmp_path / "none.py")) is None


@pytest.mark.wheel
def test_floors_of_the_published_engine(wheel_site):
    found = doctor_python.floors(str(wheel_site / "sglang/srt/entrypoints/engine.py"))
    assert {item["package"]: item["minimum"] for item in found} == {
        "flashinfer-python": "0.6.8.post1",
        "sglang-kernel": "0.4.2",
    }
    assert doctor_python.traits(str(wheel_site / "sglang")) == {
        "ddtree": False,
        "draft_rope": False,
        "draft_windows": False,
        "compact_states": False,
    }


@pytest.mark.parametrize(
    "drafter", ["", "x = get_rope_config(c)", "y = _get_dflash_rope_config(c)", "sliding_window = 3"]
)
@pytest.mark.parametrize("compact", [False, True])
def test_traits_are_what_launch_reads_off_the_same_sources(tmp_path, drafter, compact):
    package = tmp_path / "sglang"
    (package / "srt" / "models").mkdir(parents=True)
    (package / "srt" / "speculative").mkdir()
    (package / "srt" / "models" / "dflash.py").write_text(drafter)
    if compact:
        (package / "srt" / "speculative" / "ddtree_states.py").write_text("")

    def read(path):
        return (tmp_path / path).read_bytes() if (tmp_path / path).exists() else None

    version = Version("0.5.11")
    facts = {"engine": {"version": "0.5.11", "traits": doctor_python.traits(str(package))}}
    assert models._tree(Facts(facts)) == legality.Tree.of_source(read, version)


def kernel_site(site: Path) -> doctor_python.Packages:
    """A torch and a kernel wheel, in miniature."""
    symbol, gone = "_ZN3c104cuda14ExchangeDeviceEa", "_ZN2at4goneEv"
    folder = site / "sgl_kernel" / "sm100"
    folder.mkdir(parents=True)
    needed = ["libcudart.so.13", "libc10.so", "libnone.so.1", "libbeside.so.1"]
    (site / "sgl_kernel" / "more").mkdir()
    (site / "sgl_kernel" / "more" / "libbeside.so.1").write_bytes(shared_object())
    (folder / "common_ops.abi3.so").write_bytes(
        shared_object(needed, "/nowhere:$ORIGIN/../more", undefined=[symbol, gone, "memcpy"], images=[(2, 120)])
    )
    (site / "sgl_kernel" / "broken.abi3.so").write_bytes(b"\x7fELF")
    files = [
        "sgl_kernel/__init__.py",
        "sgl_kernel/sm100/common_ops.abi3.so",
        "sgl_kernel/broken.abi3.so",
        "sgl_kernel.libs/x.so.1",
    ]
    distribution(site, "sglang-kernel", "0.4.2", files=files)
    (site / "torch" / "lib").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(
        "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    )
    for name in doctor_cuda._TORCH_LIBRARIES:
        (site / "torch" / "lib" / name).write_bytes(
            shared_object(defined=[symbol] if name == "libc10_cuda.so" else ["x"])
        )
    (site / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    (site / "nvidia" / "cu13" / "lib" / "libcudart.so.13").write_bytes(shared_object())
    return doctor_python.Packages([str(site)])


def test_kernels_and_what_they_need(tmp_path):
    packages = kernel_site(tmp_path)
    torch = doctor_cuda.gather_torch(packages)
    assert (torch["version"], torch["cuda"]) == ("2.11.0+cu130", "13.0")
    found = doctor_cuda.gather_kernels(packages, torch, [])
    kernel, broken = found["kernels"]
    assert kernel["architectures"] == {"sm": [120], "ptx": []}
    assert kernel["unresolved"] == {"count": 1, "first": ["_ZN2at4goneEv"]}
    assert (broken["error"], broken["unresolved"]) == ("no 64-bit little-endian ELF file", None)
    # This machine's own loader may know one, too.
    assert found["libraries"]["libcudart.so.13"][0] == "site:nvidia/cu13/lib/libcudart.so.13"
    assert found["libraries"]["libc10.so"] == ["site:torch/lib/libc10.so"]
    assert found["libraries"]["libnone.so.1"] == []
    assert found["libraries"]["libbeside.so.1"] == ["site:sgl_kernel/more/libbeside.so.1"]
    json.dumps(found)


def test_without_torch_nothing_is_said_of_its_symbols(tmp_path):
    packages = kernel_site(tmp_path)
    (tmp_path / "torch" / "lib" / "libtorch_cpu.so").unlink()
    found = doctor_cuda.gather_kernels(packages, doctor_cuda.gather_torch(packages), [])
    assert found["kernels"][0]["unresolved"] is None


def test_a_torch_without_cuda(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n")
    assert doctor_cuda.gather_torch(doctor_python.Packages([str(tmp_path)]))["cuda"] is None


# units


SHOWN = """Id=sglang-qwen.service
LoadState=loaded
ActiveState=failed
SubState=failed
Result=exit-code
NeedDaemonReload=yes
DropInPaths=/etc/systemd/system/sglang-qwen.service.d/a.conf
ExecStart={ path=/v/bin/python ; argv[]=/v/bin/python -m x --api-key s3 --port 1 ; ignore_errors=no ; pid=0 }
MainPID=0
NRestarts=3
User=
LimitMEMLOCK=infinity
LimitNOFILE=1048576
ExecMainStartTimestampMonotonic=0
"""


def test_a_unit_as_systemctl_shows_it():
    found = doctor_units.loaded(SHOWN)
    assert found["command"] == ["/v/bin/python", "-m", "x", "--api-key", "***", "--port", "1"]
    assert (found["reload"], found["active"], found["restarts"], found["memlock"]) == (True, "failed", 3, -1)
    assert (found["user"], found["pid"], found["argv"], found["age"]) == (None, None, None, None)
    assert found["drop_ins"] == ["/etc/systemd/system/sglang-qwen.service.d/a.conf"]
    assert set(doctor_units.loaded("")) == set(found)


def test_an_environment_file_gives_names_and_no_values(tmp_path):
    path = tmp_path / "x.env"
    path.write_text('# C=1\nHF_TOKEN=hf_secret\nEMPTY=\nB="2"\n')
    path.chmod(0o640)
    found = doctor_units.environment_file(str(path), secret=True)
    assert found["names"] == ["B", "HF_TOKEN"]
    assert (found["mode"], found["sha256"]) == (0o640, None)
    assert "hf_secret" not in json.dumps(found)
    assert doctor_units.environment_file(str(path), secret=False)["sha256"]
    assert doctor_units.environment_file(str(tmp_path / "none"), secret=False) is None
