"""``support-bundle``: what it holds, that it is always the same, and that nothing secret is in it."""

from __future__ import annotations

import errno
import gzip
import json
import os
import socket
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.cli.harness import ONE, Cli

NAME = "ddtree-deploy-support"
LOCAL = ["CONTENTS.txt", "inventory.json", "patch-sets.json", "versions.json"]
HOST = ["host/doctor.json", "host/errors.json", "host/history.json", "host/services.json", "host/status.json"]
#: Part of every secret and every name that is planted.
MARK = "plant"
INVENTORY = """
default_host = "{mark}-box"
[hosts.{mark}-box]
local = "{site}"
state_dir = "{state}"
labels = {{ owner = "{mark}-owner" }}
[hosts.{mark}gpu7]
ssh = "{mark}user@gpu7.{mark}corp.example:2222"
identity_file = "~/.ssh/id_{mark}"
[hosts.x-container]
ssh = "ssh://joe{mark}@10.9.8.7"
container = "docker:{mark}-container"
[services.chat]
host = "{mark}-box"
model = "/home/{mark}home/models/chat"
environment = {{ INNOCENT = "{mark}-value", NCCL_DEBUG = "INFO", SGLANG_X_URL = "https://mirror.{mark}corp.example/x" }}
secrets = ["HF_TOKEN"]
"""


def members_of(path: Path) -> dict[str, bytes]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            found = {name: archive.read(name) for name in archive.namelist()}
    else:
        with tarfile.open(path) as archive:
            found = {item.name: archive.extractfile(item).read() for item in archive.getmembers()}
    assert all(name.startswith(f"{NAME}/") for name in found)
    return {name.removeprefix(f"{NAME}/"): data for name, data in found.items()}


@pytest.fixture
def planted(cli: Cli, monkeypatch):
    """A user whose machine, inventory, host and history are full of secrets."""
    monkeypatch.setenv("LOGNAME", f"{MARK}client")
    monkeypatch.setenv("USER", f"{MARK}client")
    monkeypatch.setenv("HF_TOKEN", f"hf_{MARK}ABCDEFGHIJ0123456789")
    monkeypatch.setenv("DDTREE_DEPLOY_WHEELHOUSE", "")
    monkeypatch.setattr(socket, "gethostname", lambda: f"{MARK}-laptop")
    monkeypatch.setattr("platform.node", lambda: f"{MARK}-laptop")
    ssh = cli.folder / "home/.ssh"
    ssh.mkdir(parents=True)
    (ssh / f"id_{MARK}").write_text(f"-----BEGIN OPENSSH PRIVATE KEY-----\n{MARK}\n-----END OPENSSH PRIVATE KEY-----\n")
    (ssh / "known_hosts").write_text(f"gpu7.{MARK}corp.example ssh-ed25519 AAAAC3Nz{MARK}\n")
    text = INVENTORY.format(mark=MARK, site=cli.site, state=cli.state)
    (cli.folder / "hosts.toml").write_text(text)
    monkeypatch.setenv("DDTREE_DEPLOY_INVENTORY", str(cli.folder / "hosts.toml"))
    reason = f"ticket 7, password {MARK}-reason for ops@{MARK}.example"
    assert cli.run("apply", cli.patch("one.patch", ONE), "-m", reason).status == 0
    return cli


ENGINE = "import sglang.srt.a, time; print('up', flush=True); time.sleep(60)"
ARGV = [
    *(
        "--model-path",
        f"/home/{MARK}joe/m",
        "--port",
        "30000",
        "--api-key",
        f"{MARK}-one",
        "--admin-api-key={MARK}-two",
    ),
    *("--config", f"https://me:{MARK}-three@host/x", "--token", f"{MARK}-four", "and", f"{MARK}-five", "--tp", "8"),
]


def test_nothing_secret_is_in_it(planted: Cli):
    command = [sys.executable, "-c", ENGINE, *(word.replace("{MARK}", MARK) for word in ARGV)]
    environment = dict(os.environ, PYTHONPATH=str(planted.site))
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as engine:
        assert engine.stdout.readline() == b"up\n"
        result = planted.run("support-bundle")
        engine.kill()
    assert result.status == 0, result.err
    assert result.err == ""
    found = members_of(planted.folder / f"{NAME}.tar.gz")
    assert sorted(found) == sorted([*LOCAL, *HOST])
    for name, data in found.items():
        assert MARK not in data.decode().lower(), (name, around(data.decode()))
    # What a maintainer needs is still there.
    status = json.loads(found["host/status.json"])
    (process,) = status["processes"]
    assert (
        "--port 30000 --api-key *** --admin-api-key=*** --config https://*** --token *** --tp 8" in process["command"]
    )
    assert [(item["name"], item["state"]) for item in status["sets"] if item["state"] == "applied"] == [
        ("one", "applied")
    ]
    assert json.loads(found["host/errors.json"]) == {"transactions": [], "services": {}}
    (entry,) = json.loads(found["host/history.json"])["history"]
    assert (entry["reason"], entry["outcome"], entry["sets"][0]["name"]) == ("***", "done", "one")
    inventory = json.loads(found["inventory.json"])
    service = inventory["services"]["chat"]
    assert service["environment"] == {"INNOCENT": "***", "NCCL_DEBUG": "INFO", "SGLANG_X_URL": "https://***"}
    assert service["secrets"] == ["HF_TOKEN"]
    assert service["host"] == inventory["default_host"] == inventory["hosts"][0]["name"] == status["host"]
    assert [item["set"] for item in inventory["hosts"]] == [[], ["identity_file", "ssh"], ["container", "ssh"]]
    assert json.loads(found["host/doctor.json"])["findings"]
    assert json.loads(found["versions.json"])["variables"] >= ["DDTREE_DEPLOY_DATA"]


def around(text: str) -> str:
    at = text.lower().find(MARK)
    return text[max(at - 80, 0) : at + 40]


def test_a_host_that_cannot_be_reached(planted: Cli):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        port = taken.getsockname()[1]
        result = planted.run("support-bundle", f"{MARK}other@127.0.0.1:{port}", "--out", "b.zip")
    assert result.status == 0, result.err
    assert "note: host is not in it: [DD301]" in result.err
    found = members_of(planted.folder / "b.zip")
    assert sorted(found) == sorted([*LOCAL, "errors.json"])
    (error,) = json.loads(found["errors.json"])
    assert (error["part"], error["code"]) == ("host", "DD301")
    assert "Not to be had: host: [DD301]" in found["CONTENTS.txt"].decode()
    assert all(MARK not in data.decode().lower() for data in found.values())


def test_what_an_alias_stands_for_is_hidden(planted: Cli, monkeypatch):
    """An error names the host that the ssh configuration leads to."""
    config = planted.folder / "ssh_config"
    config.write_text(f"Host short\n  HostName real.{MARK}corp.invalid\n  User u{MARK}\n  ProxyCommand none\n")
    with (planted.folder / "hosts.toml").open("a") as inventory:
        inventory.write('[hosts.alias]\nssh = "short"\nssh_config = "ssh_config"\n')
    result = planted.run("support-bundle", "alias")
    assert f"real.{MARK}corp.invalid" in result.err
    found = members_of(planted.folder / f"{NAME}.tar.gz")
    assert json.loads(found["errors.json"])[0]["code"] == "DD301"
    assert all(MARK not in data.decode().lower() for data in found.values())


def test_without_a_host(cli: Cli):
    result = cli.run("support-bundle")
    assert (result.status, result.err) == (0, "")
    assert [line.split()[0] for line in result.out.splitlines()[:-1]] == LOCAL
    assert "No host was asked for." in members_of(cli.folder / f"{NAME}.tar.gz")["CONTENTS.txt"].decode()


def test_no_host_contacts_none(planted: Cli):
    document = planted.run("support-bundle", "--no-host", "--list", "--json").json
    assert [item["name"] for item in document["members"]] == LOCAL
    refused = planted.run("support-bundle", "--no-host", "--host", f"{MARK}-box")
    assert (refused.status, refused.out) == (2, "")


def test_an_inventory_that_is_not_valid(planted: Cli):
    (planted.folder / "hosts.toml").write_text(f'[hosts.{MARK}-box]\nssh = "a"\npasword = "{MARK}"\n')
    result = planted.run("support-bundle", f"{MARK}-box", "--out", "b.tgz")
    assert result.status == 0
    errors = json.loads(members_of(planted.folder / "b.tgz")["errors.json"])
    assert [(item["part"], item["code"]) for item in errors] == [("inventory.json", "DD004"), ("host", "DD004")]


@pytest.mark.parametrize("name", ["b.tar.gz", "b.zip"])
def test_same_content_same_bytes(cli: Cli, name: str):
    first = cli.run("support-bundle", "--out", name, "--json").json
    path = cli.folder / name
    data = path.read_bytes()
    assert (len(data), stat.S_IMODE(path.stat().st_mode)) == (first["bytes"], 0o600)
    path.unlink()
    second = cli.run("support-bundle", "--out", name, "--json").json
    assert second == first
    assert path.read_bytes() == data
    assert sum(item["bytes"] for item in first["members"]) == sum(map(len, members_of(path).values()))
    if name.endswith("gz"):
        assert gzip.decompress(data)
        assert data[4:8] == bytes(4)  # no time in the header


def test_list_writes_nothing(cli: Cli):
    before = sorted(cli.folder.iterdir())
    listed = cli.run("support-bundle", "--list")
    assert [line.split()[0] for line in listed.out.splitlines()] == LOCAL
    assert "nothing was written" in listed.err
    assert sorted(cli.folder.iterdir()) == before
    assert cli.run("support-bundle", "--list", "--json").json["file"] is None


@pytest.mark.parametrize("name", ["b.tar.gz", "b.zip"])
def test_nothing_is_written_over(cli: Cli, name: str):
    (cli.folder / name).symlink_to("gone")
    refused = cli.run("support-bundle", "--out", name)
    assert (refused.status, refused.out) == (2, "")
    assert f"error[DD007]: {name} is there already" in refused.err
    assert not (cli.folder / "gone").exists()


def test_what_appears_meanwhile_is_not_written_over(cli: Cli, monkeypatch):
    """Also where the file system has no hard links."""
    link = os.link

    def appears(source, target):
        Path(target).write_text("mine")
        link(source, target)

    def no_links(source, target):
        Path(target).write_text("mine")
        raise OSError(errno.EPERM, "Operation not permitted")

    for stand_in in (appears, no_links):
        monkeypatch.setattr(os, "link", stand_in)
        result = cli.run("support-bundle", "--out", "b.zip")
        assert "error[DD007]: b.zip is there already" in result.err
        assert (cli.folder / "b.zip").read_text() == "mine"
        assert not list(cli.folder.glob(".b.zip*"))
        (cli.folder / "b.zip").unlink()


def test_without_hard_links(cli: Cli, monkeypatch):
    def no_links(_source, _target):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    assert cli.run("support-bundle", "--out", "b.zip").status == 0
    assert sorted(members_of(cli.folder / "b.zip")) == LOCAL


@pytest.mark.parametrize("name", ["b.rar", "b", ".zip", "no/such/folder/b.zip"])
def test_a_file_that_cannot_be(cli: Cli, name: str):
    result = cli.run("support-bundle", "--out", name)
    assert result.status == 2
    assert "Traceback" not in result.err
