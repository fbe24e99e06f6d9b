"""Looking for a host's installs: what is found, how it is told, and what is never run."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from ddtree_deploy.agent import bundle, discovery
from ddtree_deploy.agent.discovery import Host, choose, find, merged
from ddtree_deploy.agent.protocol import LOADER, AgentError
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.local import LocalTransport
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.hosts.watch import Watch
from tests.agent.harness import make_site

CASES = tomllib.loads((Path(__file__).parents[1] / "cases/discovery/hosts.toml").read_text("utf-8"))["case"]


def build(folder: Path, case: dict) -> Host:
    """The case's file tree and processes below ``folder``."""
    top, proc = folder / "top", folder / "proc"

    def said(text: str) -> str:
        return text.replace("{top}", str(top)).replace("{loader}", LOADER)

    for name in case.get("files", ()):
        path = top / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    for name, text in case.get("text", {}).items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(said(text))
    (proc / "self/ns").mkdir(parents=True)
    os.symlink("mnt:[1]", proc / "self/ns/mnt")
    for number, process in enumerate(case.get("process", ()), 100):
        place = proc / str(number)
        (place / "ns").mkdir(parents=True)
        (place / "cmdline").write_text("".join(said(word) + "\0" for word in process["argv"]))
        environ = process.get("environ", {})
        (place / "environ").write_text("".join(f"{name}={said(value)}\0" for name, value in environ.items()))
        (place / "cgroup").write_text(process.get("cgroup", "0::/"))
        os.symlink(process["exe"], place / "exe")
        os.symlink(said(process.get("cwd", "/nowhere")), place / "cwd")
        os.symlink(process.get("mnt", "mnt:[1]"), place / "ns/mnt")
    return Host(str(top), str(proc), str(top / "home/me"))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_what_is_found(case, tmp_path):
    host = build(tmp_path, case)
    found = merged(find(host))
    told = {os.path.relpath(site, host.top): items[0] for site, items in found.items()}
    assert sorted(told) == sorted(case["found"])
    for site, (python, where) in case["found"].items():
        assert told[site].python == (os.path.join(host.top, python) if python else None)
        assert told[site].where.startswith(where.replace("{top}", host.top)), told[site].where
    assert discovery.containers(host) == case.get("containers", [])


def environment(folder: Path, name: str) -> tuple[str, str]:
    """(interpreter, site) of an environment with the small engine, which can run."""
    venv.create(folder / name, with_pip=False, symlinks=True)
    (site,) = (folder / name).glob("lib/python3*/site-packages")
    for path in make_site(folder / "made" / name).iterdir():
        path.rename(site / path.name)
    return str(folder / name / "bin/python3"), str(site)


def empty(folder: Path) -> Host:
    (folder / "top").mkdir(exist_ok=True)
    return Host(str(folder / "top"), str(folder / "proc"), str(folder / "top/home"))


def refusal(own: str | None, host: Host) -> AgentError:
    with pytest.raises(AgentError) as caught:
        choose(own, host)
    return caught.value


def test_its_own_install_and_no_other(tmp_path):
    site = str(make_site(tmp_path))
    assert choose(site, empty(tmp_path)) == site


def test_several_are_all_listed(tmp_path):
    case = {
        "files": ["opt/b/bin/python3", "sgl-workspace/sglang/python/sglang/srt/"],
        "text": {"opt/b/lib/python3.12/site-packages/sglang/srt/__init__.py": ""},
    }
    host, own = build(tmp_path, case), str(make_site(tmp_path / "own"))
    error = refusal(own, host)
    assert error.code == "DD012"
    assert "--python" in error.hint
    assert "--root" in error.hint
    lines = sorted(error.details)
    assert len(lines) == 3
    for site, words in (
        (own, f"sglang 0.5.11, python {sys.executable} (imported by"),
        (f"{host.top}/opt/b/lib/python3.12/site-packages", "python " + f"{host.top}/opt/b/bin/python3 (environment"),
        (f"{host.top}/sgl-workspace/sglang/python", "no interpreter known (source tree)"),
    ):
        (line,) = [line for line in lines if line.startswith(f"{site}: ")]
        assert words in line


def test_none_at_all(tmp_path):
    error = refusal(None, empty(tmp_path))
    assert (error.code, error.more) == ("DD311", {})
    assert "--python" in error.hint


def test_only_one_in_a_container(tmp_path):
    (case,) = [case for case in CASES if "containers" in case]
    host = build(tmp_path, case)
    error = refusal(None, host)
    assert error.code == "DD311"
    assert "docker:001122334455" in error.hint


def test_a_source_tree_alone_has_no_interpreter_to_take(tmp_path):
    error = refusal(None, build(tmp_path, {"files": ["sgl-workspace/sglang/python/sglang/srt/"]}))
    assert (error.code, error.more) == ("DD311", {})
    assert "sgl-workspace/sglang/python" in error.hint


@pytest.mark.parametrize("place", ["opt", "opt/x", "opt/x/bin"])
def test_an_interpreter_that_others_could_have_planted_is_not_run(tmp_path, place):
    """Under sudo it would be run as root: found is not trusted."""
    host = build(tmp_path, {"files": ["opt/x/bin/python3", "opt/x/lib/python3.12/site-packages/sglang/srt/"]})
    assert refusal(None, host).more["python"] == f"{host.top}/opt/x/bin/python3"
    os.chmod(os.path.join(host.top, place), 0o777)
    error = refusal(None, host)
    assert error.more == {}
    assert "anyone may write" in error.hint
    os.chmod(os.path.join(host.top, place), 0o755)


def test_the_look_is_bounded(tmp_path, monkeypatch):
    for number in range(30):
        (tmp_path / f"top/opt/{number:02}/bin").mkdir(parents=True)
        (tmp_path / f"top/opt/{number:02}/bin/python3").touch()
        (tmp_path / f"top/opt/{number:02}/lib/python3.12/site-packages/sglang/srt").mkdir(parents=True)
    host = empty(tmp_path)
    assert len(merged(find(host))) == 30
    monkeypatch.setattr(discovery, "MAX_ENTRIES", 10)
    assert len(merged(find(host))) == 10
    monkeypatch.setattr(discovery, "SECONDS", -1.0)
    assert find(host) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc")
def test_a_real_process_is_seen(tmp_path):
    """Other tests' processes may run here, too: ours must be among what is found."""
    python, site = environment(tmp_path / "far/away", "sgl")
    program = [python, "-c", "print('up', flush=True); import time; time.sleep(60)", "sglang"]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as engine:
        assert engine.stdout.readline() == b"up\n"
        found = merged(list(discovery._running(Host(str(tmp_path)))))
        engine.kill()
    assert found[site][0].where == f"running: pid {engine.pid}"
    assert os.path.dirname(found[site][0].python) == os.path.dirname(python)


# --- through a session


@pytest.fixture
def unnamed(tmp_path, monkeypatch):
    """A host of which nothing is named: its python3 has no sglang, and its file system is ours."""
    host = empty(tmp_path)
    real = bundle._source.__wrapped__
    there = f"return Host(top={host.top!r}, proc={host.proc!r}, home={host.home!r})"
    assert "return Host()" in real("discovery")
    monkeypatch.setattr(bundle, "_source", lambda name: real(name).replace("return Host()", there))
    (tmp_path / "path").mkdir()
    os.symlink(sys.executable, tmp_path / "path/python3")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    return tmp_path / "top"


def test_the_only_one_is_taken(unnamed):
    python, site = environment(unnamed / "opt", "sgl")
    notices: list[str] = []
    target = Target("box", "local")
    with HostSession(target, LocalTransport, Watch(notices.append)) as session:
        for _ in range(2):
            assert session.call("history", {})["root"]["site"] == site
        assert session.target.python is not None
        assert os.path.dirname(session.target.python) == os.path.dirname(python)
        assert session.call("status", {})["root"]["foreign_python"] is None
    (notice,) = notices
    assert session.target.python in notice


def test_an_editable_one_is_taken_with_its_root(unnamed, tmp_path):
    sources = make_site(tmp_path / "sources")
    python, site = environment(unnamed / "opt", "sgl")
    info = Path(site) / "sglang-0.5.11.dist-info"
    (info / "direct_url.json").write_text(f'{{"url": "file://{sources}", "dir_info": {{"editable": true}}}}')
    (Path(site) / "sglang").rename(tmp_path / "gone")
    with HostSession(Target("box", "local"), LocalTransport) as session:
        found = session.call("history", {})["root"]
    assert (found["site"], found["version"]) == (str(sources), "0.5.11")
    assert found["python"]["prefix"] == os.path.dirname(os.path.dirname(python))


def test_several_are_asked_about(unnamed):
    environment(unnamed / "opt", "a")
    environment(unnamed / "opt", "b")
    with HostSession(Target("box", "local"), LocalTransport) as session, pytest.raises(DeployError) as caught:
        session.call("history", {})
    assert (caught.value.code, caught.value.exit_status) == ("DD012", 2)
    assert len(caught.value.details) == 2


def test_naming_one_ends_the_search(unnamed):
    python, site = environment(unnamed / "opt", "a")
    _other, there = environment(unnamed / "opt", "b")
    with HostSession(Target("box", "local", python=python), LocalTransport) as session:
        assert session.call("history", {})["root"]["site"] == site
    with HostSession(Target("box", "local", root=there), LocalTransport) as session:
        assert session.call("history", {})["root"]["site"] == there


def test_facts_need_no_install(unnamed):
    with HostSession(Target("box", "local"), LocalTransport) as session:
        assert session.call("facts", {})["version"]
