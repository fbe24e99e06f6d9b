"""A container as a host, through a stand-in for the container engine: the contract, the errors, the whole round."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.connect import connect
from ddtree_deploy.hosts.inventory import find_inventory, load_inventory, resolve_target
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.hosts.target import Target, parse_container
from ddtree_deploy.hosts.transport import Transport
from tests.agent.harness import make_site, tree_of
from tests.cli.harness import ENGINE, ONE, Cli
from tests.hosts import contract
from tests.hosts.standins import write_docker


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    log = write_docker(tmp_path / "engine")
    monkeypatch.setenv("PATH", f"{log.parent}:{os.environ['PATH']}")
    return log


@pytest.fixture
def inside(docker: Path) -> Iterator[Transport]:
    transport = connect(Target("box", "local", container="docker:sgl"))
    yield transport
    transport.close()


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(inside: Transport, check: Callable[[Transport], None]) -> None:
    check(inside)


def test_commands_run_inside(inside: Transport, docker: Path) -> None:
    process = inside.start(["sh", "-c", "echo $IN_CONTAINER"])
    assert contract.read_all(process) == b"yes\n"
    assert docker.read_text() == f"{docker.parent}/docker exec -i sgl sh -c echo $IN_CONTAINER\n"


@pytest.mark.parametrize(
    ("container", "python", "code", "words"),
    [
        ("docker:gone", None, "DD313", "No such container: gone"),
        ("docker:off", None, "DD313", "is not running"),
        ("docker:sgl", "/no/such/python", "DD309", "no such python"),
    ],
)
def test_what_goes_wrong(docker: Path, container: str, python: str | None, code: str, words: str) -> None:
    target = Target("box", "local", container=container, python=python)
    with HostSession(target, lambda: connect(target)) as session, pytest.raises(DeployError, match=words) as caught:
        session.call("facts", {})
    assert (caught.value.code, caught.value.exit_status) == (code, 4)


def test_sudo_is_for_the_engine(docker: Path) -> None:
    (docker.parent / "sudo").write_text(
        f'#!/bin/sh\n[ "$1 $2" = "-n --" ] || exit 1\nshift 2\necho "sudo $*" >> {docker}\nexec "$@"\n'
    )
    (docker.parent / "sudo").chmod(0o755)
    target = Target("box", "local", container="docker:sgl", python=sys.executable, sudo=True)
    with HostSession(target, lambda: connect(target)) as session:
        assert session.call("facts", {})["executable"] == sys.executable
    first, second = docker.read_text().splitlines()
    assert first.startswith(f"sudo docker exec -i sgl {sys.executable} -I -c ")
    assert second.startswith(f"{docker.parent}/docker exec -i sgl {sys.executable} -I -c ")


def test_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    target = Target("box", "local", container="podman:sgl")
    with HostSession(target, lambda: connect(target)) as session, pytest.raises(DeployError) as caught:
        session.call("facts", {})
    assert caught.value.code == "DD313"
    assert "podman" in caught.value.message


# --- how a container is named


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text(
        '[hosts.gpu1]\nssh = "ops@192.0.2.1"\ntransport = "openssh"\npython = "/opt/v/bin/python"\nsudo = true\n'
        '[hosts.boxed]\nssh = "gpu1"\ncontainer = "podman:sgl"\npython = "/usr/bin/python3"\n'
        '[hosts.mine]\ncontainer = "docker:sgl"\nroot = "/sgl-workspace/sglang/python"\n'
        '[hosts.here]\nlocal = "/srv"\n'
    )
    inventory = load_inventory(file)
    assert resolve_target("docker:sgl", inventory) == Target("docker:sgl", "local", container="docker:sgl")
    over = resolve_target("docker:sgl@gpu1", inventory)
    assert (over.name, over.kind, over.ssh, over.transport) == ("docker:sgl@gpu1", "ssh", "ops@192.0.2.1", "openssh")
    # The host's own install is not the container's.
    assert (over.container, over.python, over.root, over.sudo) == ("docker:sgl", None, None, True)
    ad_hoc = resolve_target("podman:a.b-c@ops@192.0.2.9:22", inventory)
    assert (ad_hoc.ssh, ad_hoc.container) == ("ops@192.0.2.9:22", "podman:a.b-c")
    boxed = resolve_target("boxed", inventory)
    assert (boxed.kind, boxed.container, boxed.python) == ("ssh", "podman:sgl", "/usr/bin/python3")
    mine = resolve_target("mine", inventory)
    assert (mine.kind, mine.ssh, mine.root) == ("local", None, "/sgl-workspace/sglang/python")
    assert [resolve_target(name, inventory).place for name in ("docker:sgl", "boxed", "gpu1")] == [
        "docker:sgl on this machine",
        "podman:sgl on gpu1",
        "openssh:ops@192.0.2.1",
    ]
    for name in ("docker:", "docker:-it", "docker:a b", "docker:sgl@boxed", "docker:sgl@", "docker:sgl@docker:x"):
        with pytest.raises(DeployError) as caught:
            resolve_target(name, inventory)
        assert caught.value.code == "DD001", name


def test_the_system_s_ssh_by_name() -> None:
    target = resolve_target("openssh:ops@192.0.2.9:22", find_inventory())
    assert (target.transport, target.ssh, target.name) == ("openssh", "ops@192.0.2.9:22", "openssh:ops@192.0.2.9:22")
    with pytest.raises(DeployError):
        resolve_target("openssh:-oProxyCommand=reboot", find_inventory())


@pytest.mark.parametrize("text", ["docker", "lxc:a", "docker:", "docker:-x", "docker:a/b", "docker:a:b", "docker:é"])
def test_what_is_no_container(text: str) -> None:
    with pytest.raises(ValueError, match=r"a container|docker:NAME"):
        parse_container(text)


# --- the whole round, as a person types it


def test_apply_and_status_in_a_container(docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user").mkdir()
    cli = Cli(tmp_path / "user", monkeypatch)
    site = make_site(tmp_path / "image", ENGINE)
    old = tree_of(site)
    where = ["--host", "docker:sgl", "--root", str(site), "--python", sys.executable, "--state-dir", str(cli.state)]
    assert cli.run("apply", cli.patch("one.patch", ONE), *where).status == 0
    status = cli.run("status", *where)
    assert status.status == 0
    assert status.out.startswith("docker:sgl: sglang ")
    assert "recreating the container loses every set" in status.err
    assert cli.run("rollback", "one", *where).status == 0
    assert tree_of(site) == old
