"""Searching snapshots: the same answers as on the host they were taken from; and hosts that lie."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots import search
from ddtree_deploy.snapshots.pull import pull
from ddtree_deploy.snapshots.search import (
    Where,
    check_find,
    check_grep,
    find_host,
    find_snapshot,
    grep_host,
    grep_snapshot,
)
from ddtree_deploy.snapshots.store import Store
from tests.snapshots.hosts import ScriptedSession, make_site, session

WHERES = [
    Where(),
    Where(under="srt/speculative"),
    Where(under="layers/attention", include=("*.py",), exclude=("*_backend.py",)),
    Where(include=("jit_kernel/**",)),
    Where(under="sglang/srt/server_args.py"),
]


@pytest.mark.wheel
def test_a_snapshot_answers_as_its_host_does(wheel_site: Path, tmp_path: Path):
    with session(wheel_site) as host:
        snapshot = pull(host, Store(tmp_path / "store")).snapshot
        for where in WHERES:
            for request in ({"pattern": "mamba"}, {"pattern": "T.*VERIFY$", "word": True, "before": 1, "after": 2}):
                assert list(grep_snapshot(snapshot, request, where)) == list(grep_host(host, request, where))
        for request in ({"symbol": "HybridLinearAttnBackend", "refs": True}, {"symbol": "EAGLEWorker.__init__"}):
            there, here = find_host(host, request, Where()), find_snapshot(snapshot, request, Where())
            assert there == here
            assert there.definitions


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make_site(tmp_path / "site")


def test_unknown_folders_and_bad_patterns(site: Path, tmp_path: Path):
    with session(site) as host:
        snapshot = pull(host, Store(tmp_path / "store")).snapshot
    for pattern, where in (("x", Where(under="nowhere")), ("(", Where()), ("x", Where(include=("[",)))):
        with pytest.raises(DeployError) as caught:
            list(grep_snapshot(snapshot, {"pattern": pattern}, where))
        assert caught.value.code == "DD008"
    with pytest.raises(DeployError) as caught:
        find_snapshot(snapshot, {"symbol": "a b"}, Where())
    assert caught.value.code == "DD008"
    assert [item.path for item in find_snapshot(snapshot, {"symbol": "b"}, Where(under="a")).definitions] == [
        "sglang/srt/a/b.py"
    ]


def test_requests_are_checked_before_a_host_is_asked():
    check_grep({"pattern": "x", "word": True})
    check_find({"symbol": "a.b"})
    with pytest.raises(DeployError) as caught:
        check_grep({"pattern": "("})
    assert caught.value.code == "DD008"
    with pytest.raises(DeployError) as caught:
        check_find({"symbol": "("})
    assert caught.value.code == "DD008"


@pytest.mark.parametrize(
    "row",
    [
        "text",
        {},
        [],
        ["match", "p", "1", "text"],
        ["match", "p", 1],
        ["match", "p", 1, "text", "more"],
    ],
)
def test_hits_that_are_none(row: Any):
    host = ScriptedSession([(b"B", json.dumps(row).encode() + b"\n"), (b"Q", {})])
    with pytest.raises(DeployError) as caught:
        list(grep_host(host, {"pattern": "x"}, Where()))  # type: ignore[arg-type]
    assert caught.value.code == "DD307"


@pytest.mark.parametrize(
    "row",
    [
        ["other", "p", 1, "x"],
        ["definition", "f", "m", "no such kind", "p", 1, 1, 1, [], 1, []],
        ["definition", "f", "m", "function", "p", 1, 1, 1, [], 1, [2]],
        ["reference", "p", 1, "x", "name"],
        ["unparsed", "p", "1", "x"],
    ],
)
def test_findings_that_are_none(row: Any):
    host = ScriptedSession([(b"B", json.dumps(row).encode() + b"\n"), (b"Q", {})])
    with pytest.raises(DeployError) as caught:
        find_host(host, {"symbol": "x"}, Where())  # type: ignore[arg-type]
    assert caught.value.code == "DD307"


def test_data_that_is_no_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "MAX_LINE", 1000)
    for data in (b"[1, 2", b"x" * 300_000, b"\xff\n"):
        host = ScriptedSession([(b"B", data), (b"Q", {})])
        with pytest.raises(DeployError) as caught:
            list(grep_host(host, {"pattern": "x"}, Where()))  # type: ignore[arg-type]
        assert caught.value.code == "DD307"


def test_a_reader_that_stops_early(site: Path):
    with session(site) as host:
        hits = grep_host(host, {"pattern": "kernel"}, Where())
        assert next(hits).render() == "sglang/jit_kernel/k.cu:1:kernel"
        hits.close()  # type: ignore[attr-defined]
        assert sum(1 for _hit in grep_host(host, {"pattern": "kernel"}, Where())) == 1000


def interpreters() -> list[str]:
    """This python, and every other from 3.8 on that is found here."""
    found = {sys.version_info[:2]: sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    for minor in range(8, 16):
        on_path = shutil.which(f"python3.{minor}")
        candidates = ([on_path] if on_path else []) + sorted(map(str, pyenv.glob(f"versions/3.{minor}.*/bin/python")))
        for candidate in candidates:
            asked = subprocess.run([candidate, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True)
            if asked.returncode == 0:
                major, minor_found = map(int, asked.stdout.split())
                found.setdefault((major, minor_found), candidate)
    return [found[version] for version in sorted(found)]


SOURCES = {
    "sglang/srt/__init__.py": b"",
    "sglang/srt/a.py": b"from .b import (\n    x,\n    target,\n)\n@deco\ndef target(*, k=1): return f'{target}'\n",
    "sglang/srt/m.py": b"match target:\n    case target: pass\n",
    "sglang/srt/\xc3\xa9.py".encode("latin-1").decode("utf-8"): "é = 'target'\n".encode(),
}


@pytest.mark.parametrize("python", interpreters(), ids=lambda path: path.replace("/", "_"))
def test_every_python_gives_the_same_answers(tmp_path: Path, python: str):
    site = make_site(tmp_path / "site", SOURCES)
    with session(site, python=python) as host:
        pulled = pull(host, Store(tmp_path / "store"))
        assert dict(pulled.snapshot.files()) == SOURCES
        assert pull(host, Store(tmp_path / "store")).same
        hits = list(grep_host(host, {"pattern": "target|é", "after": 1}, Where()))
        found = find_host(host, {"symbol": "target", "refs": True}, Where())
    assert hits == list(grep_snapshot(pulled.snapshot, {"pattern": "target|é", "after": 1}, Where()))
    here = find_snapshot(pulled.snapshot, {"symbol": "target", "refs": True}, Where())
    parsed = [item for item in found.definitions if item.path != "sglang/srt/m.py"]
    assert parsed == [item for item in here.definitions if item.path != "sglang/srt/m.py"]
    assert [item.kind for item in parsed] == ["function", "import"]
    without_match = [item.path for item in found.unparsed] == ["sglang/srt/m.py"]
    version = pulled.snapshot.header.facts["root"]["python"]["version"].split(".")
    assert without_match == (int(version[1]) < 10)
    if not without_match:
        assert found == here
