"""The demo: the main job on the real wheel, over SSH on loopback, in one command."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest


@pytest.mark.wheel
def test_demo(cli, wheel, monkeypatch):
    temporary = cli.folder / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    svg = cli.folder / "demo.svg"
    environment = dict(os.environ)
    result = cli.run("demo", "--wheel", str(wheel), "--svg", str(svg))
    assert result.status == 0, result.err
    text = result.out
    assert "# 25 lines" in text
    for line in ("eagle_worker.py:893:", "eagle_worker.py:1034:", "eagle_worker.py:1055:", "eagle_info.py:156:"):
        assert line in text
    assert "hybrid_linear_attn_backend.py:937-1000" in text
    assert "ascend_hybrid_linear_attn_backend.py:220-275" in text
    assert "--tp-size 8" in text
    before, now = (line.split()[-1] for line in text.splitlines() if line.startswith("# the tree "))
    assert before == now
    assert "# identical, after" in text
    assert svg.read_text().startswith("<svg")
    # Nothing is left, here or in the environment.
    assert list(temporary.iterdir()) == []
    assert not (cli.folder / "data").exists()
    assert dict(os.environ) == environment


@pytest.mark.wheel
def test_demo_refuses_a_wheel_that_is_not_the_published_one(cli, tmp_path):
    fake = tmp_path / "sglang-0.5.11-cp312-cp312-manylinux_2_34_x86_64.whl"
    fake.write_bytes(b"PK")
    result = cli.run("demo", "--wheel", str(fake))
    assert result.status == 3
    assert "[DD405]" in result.err
    assert not list(Path(tempfile.gettempdir()).glob("ddtree-demo-*/site-packages"))
