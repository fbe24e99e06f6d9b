"""``wheel``: what is pinned and here, adding, fetching and pinning."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ddtree_deploy.snapshots import index, pins, wheels
from tests.snapshots.smallwheel import make_wheel
from tests.snapshots.test_index import GOOD, Index

TAGS = "cp312-cp312-manylinux_2_34_x86_64"


@pytest.fixture
def cli(cli, monkeypatch):
    monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(cli.folder / "cache"))
    for name in ("WHEELHOUSE", "OFFLINE"):
        monkeypatch.delenv(f"DDTREE_DEPLOY_{name}", raising=False)
    monkeypatch.setattr(wheels, "_download", lambda *_: pytest.fail("a download that nobody asked for"))
    return cli


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / f"sglang-0.0.1-{TAGS}.whl")


def test_a_wheel_of_ones_own(cli, small: Path):
    sha256 = hashlib.sha256(small.read_bytes()).hexdigest()
    refused = cli.run("wheel", "add", str(small))
    assert refused.status == 3
    assert "DD405" in refused.err
    assert f"sha256 {sha256}" in refused.err
    assert "--pin" in refused.err
    assert not (cli.folder / "cache").exists()
    added = cli.run("wheel", "add", "--pin", str(small), "--json").json["wheels"]
    assert [(item["sha256"], item["new_pin"]) for item in added] == [(sha256, True)]
    assert Path(added[0]["file"]).read_bytes() == small.read_bytes()
    again = cli.run("wheel", "add", str(small))
    assert again.status == 0
    assert sha256 in again.out
    (listed,) = [item for item in cli.run("wheel", "list", "--here", "--json").json["wheels"] if item["file"]]
    assert (listed["version"], listed["pinned_by"], listed["file"]) == ("0.0.1", "user", added[0]["file"])
    assert "0.0.1    1 wheel (yours)  cp312" in cli.run("wheel", "list", "--here").out


def test_one_bad_wheel_of_several_adds_none(cli, small: Path):
    bad = cli.folder / "bad.whl"
    bad.write_bytes(b"no wheel")
    result = cli.run("wheel", "add", "--pin", str(small), str(bad))
    assert (result.status, "bad.whl" in result.err) == (3, True)
    assert not (cli.folder / "cache").exists()
    assert cli.run("wheel", "list", "--here", "--json").json["wheels"] == []


def test_a_wheelhouse(cli, small: Path, monkeypatch):
    assert cli.run("wheel", "add", "--pin", str(small)).status == 0
    house = cli.folder / "house"
    house.mkdir()
    file = house / small.name
    file.write_bytes(small.read_bytes())
    (listed,) = cli.run("wheel", "list", "--here", "--wheelhouse", str(house), "--json").json["wheels"]
    assert listed["file"] == str(file)
    monkeypatch.setenv("DDTREE_DEPLOY_WHEELHOUSE", str(house))
    assert str(file) in cli.run("wheel", "list", "--here").out
    missing = cli.run("wheel", "list", "--wheelhouse", str(cli.folder / "none"))
    assert (missing.status, "DD007" in missing.err) == (2, True)


def test_fetch_says_what_it_downloads(cli, small: Path, monkeypatch):
    pin = pins.Pin("0.0.1", TAGS, hashlib.sha256(small.read_bytes()).hexdigest(), 12_300_000)
    monkeypatch.setattr(wheels, "pins", lambda: (pin,))
    monkeypatch.setattr(wheels, "_download", lambda *_: Path(make_wheel(cli.folder / "served.whl")))
    offline = cli.run("wheel", "fetch", "0.0.1", "--offline")
    assert (offline.status, "offline" in offline.err) == (3, True)
    monkeypatch.setenv("DDTREE_DEPLOY_OFFLINE", "1")
    assert cli.run("wheel", "fetch", "0.0.1").status == 3
    monkeypatch.delenv("DDTREE_DEPLOY_OFFLINE")
    odd = cli.run("wheel", "fetch", "0.0.1", "--tags", "cp399-cp399-any")
    assert (odd.status, TAGS in odd.err) == (3, True)
    unknown = cli.run("wheel", "fetch", "7.7.7")
    assert (unknown.status, "wheel pin 7.7.7" in unknown.err) == (3, True)
    assert not (cli.folder / "cache").exists()
    fetched = cli.run("wheel", "fetch", "0.0.1")
    assert fetched.status == 0
    assert fetched.err == f"downloading {pin.filename} (12.3 MB)\n"
    assert fetched.out == f"0.0.1  {cli.folder}/cache/wheels/{pin.filename}\n"
    again = cli.run("wheel", "fetch", "0.0.1")
    assert (again.status, again.err) == (0, "")


@pytest.mark.parametrize("checkout", [True, False])
def test_pin_takes_the_indexs_hashes(cli, monkeypatch, checkout: bool):
    file = cli.folder / "checkout" / "pins.toml"
    monkeypatch.setattr(pins, "checkout_file", lambda: file if checkout else None)
    server = Index()
    try:
        server.body = json.dumps(GOOD).encode()
        result = cli.run("wheel", "pin", "9.9.9", "--index", server.url)
    finally:
        server.close()
    assert result.status == 0
    assert result.out.splitlines()[0] == f"{'2' * 64}  sglang-9.9.9-cp311-cp311-manylinux_2_34_x86_64.whl"
    where = file if checkout else pins.user_file()
    assert {pin.sha256 for pin in pins.read_pins(where.read_bytes(), "x")} == {"1" * 64, "2" * 64}
    assert result.err == f"2 of 2 wheels newly pinned in {where}\n"


def test_pin_believes_no_other_hash_than_the_pinned(cli, monkeypatch):
    monkeypatch.setattr(pins, "checkout_file", lambda: cli.folder / "pins.toml")
    name = pins.shipped_pins()[-1].filename
    body = {"files": [{"filename": name, "hashes": {"sha256": "0" * 64}, "size": 1}]}
    server = Index()
    try:
        server.body = json.dumps(body).encode()
        result = cli.run("wheel", "pin", pins.shipped_pins()[-1].version, "--index", server.url)
    finally:
        server.close()
    assert (result.status, "DD405" in result.err) == (3, True)
    assert not (cli.folder / "pins.toml").exists()


def test_pin_asks_nobody_offline(cli, monkeypatch):
    monkeypatch.setattr(index, "published_wheels", lambda *_: pytest.fail("asked"))
    assert cli.run("wheel", "pin", "9.9.9", "--offline").status == 3


def test_diff_with_pristine_downloads_nothing_unasked(cli, small: Path, monkeypatch):
    pin = pins.Pin("0.4.0", TAGS, hashlib.sha256(small.read_bytes()).hexdigest(), 5)
    monkeypatch.setattr(wheels, "pins", lambda: (pin,))
    assert cli.run("snapshot", f"local:{cli.site}").status == 0
    result = cli.run("diff", "latest")
    assert result.status == 3
    assert "the wheel of sglang 0.4.0 is not here" in result.err
    assert "ddtree-deploy wheel fetch 0.4.0" in result.err
    monkeypatch.setenv("DDTREE_DEPLOY_OFFLINE", "1")
    offline = cli.run("diff", "latest", "--fetch")
    assert (offline.status, "offline" in offline.err) == (3, True)
    monkeypatch.delenv("DDTREE_DEPLOY_OFFLINE")
    monkeypatch.setattr(wheels, "_download", lambda *_: make_wheel(cli.folder / "served.whl"))
    fetched = cli.run("diff", "latest", "--fetch", "--stat")
    assert fetched.status == 1
    assert "downloading" in fetched.err


def test_the_demo_downloads_nothing_offline(cli, monkeypatch):
    monkeypatch.setenv("DDTREE_DEPLOY_OFFLINE", "1")
    result = cli.run("demo")
    assert (result.status, "offline" in result.err) == (3, True)
