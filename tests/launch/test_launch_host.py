"""``launch --host``: the engine and the models as they lie on a host, through the real agent on a folder here."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.console import Console
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.local import LocalTransport
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.launch.known import models_of_files, models_of_host
from ddtree_deploy.launch.service import Service
from ddtree_deploy.snapshots.pristine import PristineTree
from tests.launch import models

# What the parser of 0.5.11 is declared in, and what shows how the drafter is run.
SOURCES = (
    "sglang/__init__.py",
    "sglang/srt/server_args.py",
    "sglang/srt/models/dflash.py",
    "sglang/srt/parser/reasoning_parser.py",
    "sglang/srt/function_call/function_call_parser.py",
)
INVENTORY = """
[hosts.box]
local = "{site}"
python = "{python}"
[services.dflash]
host = "box"
model = "{models}/target"
algorithm = "DFLASH"
drafter = "{models}/draft"
attention_backend = "flashinfer"
user = "sglang"
gpus = [0, 1]
tp = 2
[services.ddtree]
host = "box"
model = "{models}/target"
algorithm = "DDTREE"
budget = 15
drafter = "{models}/draft"
attention_backend = "triton"
user = "sglang"
gpus = [0, 1]
tp = 2
[services.odd]
host = "box"
model = "{models}/target"
tp = 2
gpus = [0, 1]
attention_backend = "flashinfr"
kv_cache_dtype = "fp8_e4m3"
extra_args = ["--cuda-graph-bs", "1", "2", "--decode-log-interval", "soon", "--no-such-flag"]
[services.hub]
host = "box"
model = "org/model"
"""


@pytest.fixture
def box(tmp_path: Path, published: Callable[[str], PristineTree]) -> Path:
    """A folder with a small install of 0.5.11, models and an inventory of both."""
    tree = published("0.5.11")
    for path in (*SOURCES, f"{tree.dist_info}/METADATA"):
        target = tmp_path / "site" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(tree[path])
    for name, config in (("target", "qwen3.6-27b"), ("draft", "qwen3.6-27b-dflash")):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(models.config(config)))
    inventory = INVENTORY.format(site=tmp_path / "site", python=sys.executable, models=tmp_path / "models")
    (tmp_path / "inventory.toml").write_text(inventory)
    return tmp_path


def launch(box: Path, *arguments: str) -> tuple[int, str, str]:
    from ddtree_deploy.cli.main import run

    out, err = io.StringIO(), io.StringIO()
    status = run(["launch", "--inventory", str(box / "inventory.toml"), *arguments], Console(out, err))
    return status, out.getvalue(), err.getvalue()


@pytest.mark.wheel
def test_everything_is_checked_on_the_host(box: Path) -> None:
    weights = box / "models" / "target" / "model-00001-of-00001.safetensors"
    with weights.open("wb") as file:
        header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 54_000_000_000]}}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 54_000_000_000)
    status, out, err = launch(box, "--service", "dflash", "--host", "box", "--strict", "--json")
    document = json.loads(out)
    assert status == 0, err
    assert document["unchecked"] == []
    assert document["checked_against"].startswith("snapshot box/")
    rows = {row["what"]: row["bytes"] for row in document["memory"]["rows"]}
    assert rows["weights"] == (54_000_000_000 + 8 + len(header)) // 2
    assert "--mamba-scheduler-strategy" in document["argv"]
    assert any("RoPE base 1e6 instead of 1e+07" in note for note in document["notes"])


@pytest.mark.wheel
def test_ddtree_is_refused_until_the_set_is_applied(box: Path) -> None:
    status, out, err = launch(box, "--service", "ddtree", "--host", "box")
    assert (status, out) == (3, "")
    assert "has no DDTREE: apply patch set ddtree there" in err


@pytest.mark.wheel
def test_flags_are_held_against_the_installed_parser(box: Path) -> None:
    status, _, err = launch(box, "--service", "odd", "--host", "box")
    assert status == 3
    assert "a hybrid model on compute capability 12.0 takes" in err  # every reason at once
    assert "--attention-backend does not take 'flashinfr'; did you mean 'flashinfer'?" in err
    assert "--decode-log-interval takes an integer, not 'soon'" in err
    assert "this engine has no --no-such-flag" in err
    assert "--cuda-graph-bs" not in err


@pytest.mark.wheel
def test_the_newest_snapshot_stands_in_for_the_host(box: Path) -> None:
    assert launch(box, "--service", "dflash", "--host", "box")[0] == 0
    status, out, err = launch(box, "--service", "dflash", "--json")
    document = json.loads(out)
    assert status == 0
    assert document["checked_against"].startswith("snapshot box/")
    assert any("is still as snapshot box/" in item for item in document["unchecked"])
    assert f"not checked: {document['unchecked'][0]}" in err
    assert document["memory"] is None
    named = launch(box, "--service", "dflash", "--snapshot", "latest", "--json")
    assert json.loads(named[1])["checked_against"] == document["checked_against"]


@pytest.mark.wheel
def test_a_host_that_changed_is_read_anew(box: Path) -> None:
    assert launch(box, "--service", "dflash", "--host", "box")[0] == 0
    source = box / "site" / "sglang/srt/server_args.py"
    text = source.read_text()
    assert '"--max-running-requests"' in text
    source.write_text(text.replace('"--max-running-requests"', '"--most-running-requests"'))
    status, _, err = launch(box, "--service", "dflash", "--host", "box")
    assert status == 3
    assert "this engine has no --max-running-requests; did you mean '--most-running-requests'?" in err


@pytest.mark.wheel
def test_a_missing_model_is_an_error_and_one_of_a_hub_is_unchecked(box: Path) -> None:
    (box / "models" / "target" / "config.json").unlink()
    status, _, err = launch(box, "--service", "dflash", "--host", "box")
    assert status == 2
    assert "error[DD611]" in err
    assert "config.json" in err
    status, _, err = launch(box, "--service", "hub", "--host", "box")
    assert status == 0
    assert "'org/model' is no folder on the host" in err
    assert launch(box, "--service", "hub", "--host", "box", "--strict")[0] == 3


@pytest.mark.wheel
@pytest.mark.parametrize(
    "arguments",
    [("--host", "box", "--engine", "0.5.11"), ("--host", "box", "--model-config", "c"), ("--out", "o", "--json", "x")],
)
def test_usage(box: Path, arguments: tuple[str, ...]) -> None:
    assert launch(box, "--service", "dflash", *arguments)[0] == 2


def session(site: Path) -> HostSession:
    return HostSession(Target("box", "local", root=str(site), python=sys.executable), LocalTransport)


def facts(box: Path, **keys: Any) -> Any:
    service = Service(name="s", model=str(box / "models" / "target"), **keys)
    with session(box / "site") as opened:
        return models_of_host(opened, service)


@pytest.mark.wheel
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is not JSON"),
        (b"[]", "is no JSON object"),
        (b"\xff", "JSON"),
        (b"{" * 100_000, "is not JSON"),
        (b" " * (1 << 20) + b"{}", "is larger than"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
    ],
)
def test_damaged_files_on_the_host(box: Path, data: bytes, why: str) -> None:
    (box / "models" / "target" / "config.json").write_bytes(data)
    with pytest.raises(DeployError) as caught:
        facts(box)
    assert caught.value.code == "DD611"
    assert why in caught.value.message


@pytest.mark.wheel
def test_only_folders_named_by_the_service_are_read(box: Path) -> None:
    found = facts(box, drafter=str(box / "models" / "draft"))
    assert found.model is not None
    assert found.drafter is None  # nothing speculates
    with session(box / "site") as opened, pytest.raises(DeployError) as caught:
        opened.call("models", {"folders": {"x": "relative"}})
    assert caught.value.code == "DD307"
    with session(box / "site") as opened, pytest.raises(DeployError):
        opened.call("models", {"folders": {str(number): "/" for number in range(9)}})


def test_files_here(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(models.config("qwen3.6-27b")))
    known = models_of_files(path, None)
    assert known.model is not None
    assert known.model.weight_bytes is None
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 77}}')
    assert models_of_files(path, None).model.weight_bytes == 77  # type: ignore[union-attr]
    (tmp_path / "a.safetensors").write_bytes(b"1234")
    assert models_of_files(path, None).model.weight_bytes == 4  # type: ignore[union-attr]
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert models_of_files(path, None).model.weight_bytes is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("data", "code"), [(b"[1]", "DD611"), (b"{", "DD611"), (b"[" * 100_000, "DD611"), (b" " * (2 << 20), "DD611")]
)
def test_damaged_files_here(tmp_path: Path, data: bytes, code: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(DeployError) as caught:
        models_of_files(path, None)
    assert caught.value.code == code
