from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

import platformdirs
import pytest

from ddtree_deploy import resources
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts import inventory as module
from ddtree_deploy.hosts.inventory import find_inventory, load_inventory, resolve_target
from ddtree_deploy.hosts.target import Target

CASES = Path(__file__).parents[1] / "cases" / "inventories"
ONE_HOST = 'default_host = "{0}"\n[hosts.{0}]\nssh = "{0}"\n'


def _faults(path: Path) -> list[str]:
    """The faults of an inventory, each without the folder in front."""
    try:
        load_inventory(path)
    except DeployError as error:
        assert error.code == "DD004"
        assert error.exit_status == 2
        assert "\n" not in error.message
        return [
            fault.removeprefix(f"{path}:").removeprefix(f"{path}{os.sep}").lstrip()
            for fault in error.details or [error.message]
        ]
    return []


@pytest.mark.parametrize("case", sorted(CASES.glob("*.toml")), ids=lambda path: path.stem)
def test_faults_name_file_line_and_key(case: Path) -> None:
    wanted = case.with_suffix(".expect").read_text("utf-8").splitlines()
    found = _faults(case)
    assert len(found) == len(wanted), found
    for fault, start in zip(found, wanted, strict=True):
        assert fault.startswith(start), (fault, start)


@pytest.mark.parametrize("case", sorted(path for path in CASES.iterdir() if path.is_dir()), ids=lambda path: path.name)
def test_faults_of_a_folder(case: Path) -> None:
    wanted = (case / "expect").read_text("utf-8").splitlines()
    found = _faults(case)
    assert len(found) == len(wanted), found
    for fault, pattern in zip(found, wanted, strict=True):
        assert fnmatchcase(fault.replace("[", "("), pattern), (fault, pattern)


def test_one_fault_is_the_message_and_many_are_details(tmp_path: Path) -> None:
    file = tmp_path / "i.toml"
    file.write_text("[hosts.a]\nssh = 1\n")
    with pytest.raises(DeployError) as caught:
        load_inventory(file)
    assert caught.value.message == f"{file}:2: hosts.a.ssh: must be a string, not an integer"
    assert caught.value.details == ()
    file.write_text("[hosts.a]\nssh = 1\nsudo = 2\n")
    with pytest.raises(DeployError) as caught:
        load_inventory(file)
    assert caught.value.message == f"the inventory {file} has 2 faults"
    assert [detail.split(": ")[0] for detail in caught.value.details] == [f"{file}:2", f"{file}:3"]


def test_values_arrive() -> None:
    inventory = load_inventory(CASES / "full.toml")
    assert not inventory.shipped
    assert inventory.default_host == "rtx-1"
    assert inventory.hosts["rtx-1"] == Target(
        name="rtx-1",
        kind="ssh",
        ssh="ops@[2001:db8::7]:2222",
        python="/opt/v e n v/bin/python",
        root="/srv/py",
        sudo=True,
        state_dir="/var/lib/x",
        labels={"gpu": "rtx6000", "site_1": "é ü"},
        connect_timeout=2.5,
        identity_file=str(CASES / "keys" / "id"),
        known_hosts="/etc/kh",
        ssh_config="none",
    )
    assert inventory.hosts["here"].kind == "local"
    assert inventory.hosts["here"].root == str(CASES / ".." / "python")
    assert inventory.hosts["dots.in.name"].ssh == "alias"


def test_home_is_expanded_and_a_missing_home_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "i.toml"
    file.write_text('[hosts.a]\nssh = "a"\nidentity_file = "~/k"\nknown_hosts = "~no-such-user/k"\n')
    host = load_inventory(file).hosts["a"]
    assert host.identity_file == "/home/me/k"
    assert host.known_hosts == str(tmp_path / "~no-such-user/k")


def test_a_folder_is_one_inventory_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(ONE_HOST.format("a"))
    (tmp_path / "b.toml").write_text('[hosts.b]\nssh = "b"\n[services.s]\nmodel = "/m"\n')
    (tmp_path / ".#b.toml").write_text("not toml at all")
    (tmp_path / "notes.txt").write_text("not toml at all")
    inventory = load_inventory(tmp_path)
    assert list(inventory.hosts) == ["a", "b"]
    assert inventory.services["s"].model == "/m"
    assert inventory.default_host == "a"


def test_nothing_to_load(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.toml"):
        with pytest.raises(DeployError) as caught:
            load_inventory(path)
        assert caught.value.code == "DD003"


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "gone.toml").symlink_to("nowhere")
    with pytest.raises(DeployError) as caught:
        load_inventory(tmp_path)
    assert caught.value.code == "DD003"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder ``work`` and a user's configuration folder ``config`` under one path."""
    work, config = tmp_path / "work", tmp_path / "config"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv(module.ENVIRONMENT, raising=False)
    monkeypatch.setattr(platformdirs, "user_config_path", lambda app: config / app)
    return tmp_path


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_order_of_places(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_inventory().shipped
    _write(places / "config/ddtree-deploy/inventory.toml", ONE_HOST.format("user"))
    assert find_inventory().default_host == "user"
    _write(places / "work/inventories/here.toml", ONE_HOST.format("work"))
    assert find_inventory().default_host == "work"
    monkeypatch.setenv(module.ENVIRONMENT, str(_write(places / "env.toml", ONE_HOST.format("env"))))
    assert find_inventory().default_host == "env"
    assert find_inventory(str(_write(places / "flag.toml", ONE_HOST.format("flag")))).default_host == "flag"


def test_the_users_folder_and_file_are_one(places: Path) -> None:
    _write(places / "config/ddtree-deploy/inventory.toml", ONE_HOST.format("one"))
    _write(places / "config/ddtree-deploy/inventories/two.toml", '[hosts.two]\nssh = "two"\n')
    assert set(find_inventory().hosts) == {"one", "two"}
    _write(places / "config/ddtree-deploy/inventories/three.toml", '[hosts.one]\nssh = "x"\n')
    with pytest.raises(DeployError, match="is already at"):
        find_inventory()


def test_a_named_place_is_not_passed_over(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.ENVIRONMENT, str(places / "absent.toml"))
    with pytest.raises(DeployError, match="no inventory at"):
        find_inventory()


def test_a_broken_inventory_is_not_passed_over(places: Path) -> None:
    _write(places / "work/inventories/broken.toml", "x = ")
    _write(places / "config/ddtree-deploy/inventory.toml", ONE_HOST.format("user"))
    with pytest.raises(DeployError, match="not TOML"):
        find_inventory()


def test_an_example_does_not_hide_the_users_own(places: Path) -> None:
    text = resources.example_inventory().read_text("utf-8")
    _write(places / "work/inventories/example.toml", text)
    assert find_inventory().shipped
    _write(places / "config/ddtree-deploy/inventories/hosts.toml", ONE_HOST.format("mine"))
    assert find_inventory().default_host == "mine"


def test_an_example_beside_a_real_inventory_says_nothing(places: Path) -> None:
    _write(places / "work/inventories/example.toml", resources.example_inventory().read_text("utf-8"))
    _write(places / "work/inventories/real.toml", ONE_HOST.format("rtx"))
    inventory = find_inventory()
    assert not inventory.shipped
    assert inventory.hosts["rtx"].ssh == "rtx"
    assert set(inventory.hosts) == {"rtx"}
    assert not inventory.services


def test_the_shipped_example_is_valid_and_contacts_no_host(places: Path) -> None:
    inventory = find_inventory()
    assert inventory.path == resources.example_inventory()
    assert inventory.services
    for name in (None, *inventory.hosts):
        with pytest.raises(DeployError) as caught:
            resolve_target(name, inventory)
        assert (caught.value.code, caught.value.exit_status) == ("DD005", 2)
        assert str(places / "config/ddtree-deploy/inventories") in str(caught.value.hint)
        assert "example = true" in str(caught.value.hint)


def test_the_hint_of_the_example_leads_to_a_usable_inventory(places: Path) -> None:
    text = resources.example_inventory().read_text("utf-8")
    assert text.count("\nexample = true\n") == 1
    _write(places / "config/ddtree-deploy/inventories/hosts.toml", text.replace("\nexample = true\n", "\n"))
    assert resolve_target(None, find_inventory()).ssh == "ops@rtx.host.example"


def test_names_that_need_no_inventory(places: Path) -> None:
    inventory = find_inventory()
    assert resolve_target("ops@192.0.2.9:22", inventory).ssh == "ops@192.0.2.9:22"
    alias = resolve_target("my-alias", inventory)
    assert (alias.kind, alias.ssh, alias.name) == ("ssh", "my-alias", "my-alias")
    assert "taken as an ssh name" in str(alias.unresolved_hint)
    (places / "site/sglang/srt").mkdir(parents=True)
    local = resolve_target(f"local:{places / 'site/sglang'}", inventory)
    assert (local.kind, local.root, local.name) == ("local", str(places / "site"), f"local:{places / 'site'}")


def test_an_inventory_name_goes_before_an_alias(tmp_path: Path) -> None:
    file = _write(tmp_path / "i.toml", '[hosts.rtx]\nssh = "ops@192.0.2.1"\nsudo = true\n')
    inventory = load_inventory(file)
    assert resolve_target("rtx", inventory).sudo
    assert "rtx" in str(resolve_target("rtz", inventory).unresolved_hint)


@pytest.mark.parametrize("text", ["", "-F/etc/passwd", "a b", "local:", "local:\n", "host:port", "x\x1b]0;t\x07"])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(DeployError) as caught:
        resolve_target(text, load_inventory(CASES / "empty.toml"))
    assert caught.value.code == "DD001"
    assert caught.value.message.isprintable()


def test_no_host_and_no_default() -> None:
    with pytest.raises(DeployError) as caught:
        resolve_target(None, load_inventory(CASES / "empty.toml"))
    assert caught.value.code == "DD002"


def test_a_local_host_of_the_inventory_is_located_when_used(tmp_path: Path) -> None:
    file = _write(tmp_path / "i.toml", 'default_host = "here"\n[hosts.here]\nlocal = "site/sglang/srt"\nsudo = true\n')
    inventory = load_inventory(file)
    with pytest.raises(DeployError) as caught:
        resolve_target(None, inventory)
    assert caught.value.code == "DD007"
    (tmp_path / "site/sglang/srt").mkdir(parents=True)
    here = resolve_target(None, inventory)
    assert (here.name, here.root, here.sudo) == ("here", str(tmp_path / "site"), True)
