"""Trees that no installer's RECORD describes: editable installs, checkouts, the images' source trees."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.deploy import baseline
from ddtree_deploy.deploy.baseline import RECORD, container_notes, judge
from ddtree_deploy.hosts.target import Target
from tests.agent.harness import FILES, make_site
from tests.cli.harness import ENGINE, ONE, Cli
from tests.hosts.standins import write_docker

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "sglang"
version = "{version}"
[tool.hatch.build]
dev-mode-dirs = ["."]
[tool.hatch.build.targets.wheel]
packages = ["sglang"]
"""


def checkout(folder: Path, version: str = ENGINE) -> Path:
    """A source tree as the images have it: no dist-info, the version in a module; returns the site."""
    site = folder / "sglang/python"
    site.mkdir(parents=True)
    for path in make_site(folder / "made", version).glob("sglang"):
        shutil.copytree(path, site / "sglang")
    (site / "sglang/_version.py").write_text(f"__version__ = version = '{version}'\n")
    return site


def git(site: Path, *arguments: str, **options: str) -> str:
    done = subprocess.run(
        [*GIT, "-C", str(site), *arguments], check=True, capture_output=True, text=True, env={**os.environ, **options}
    )
    return done.stdout.strip()


def commit(site: Path, *init: str) -> str:
    if not any((folder / ".git").exists() for folder in (site, *site.parents)):
        git(site, "init", "-q", *init)
    git(site, "add", "-A")
    git(site, "commit", "-q", "-m", "x")
    return git(site, "rev-parse", "HEAD")


@pytest.fixture
def cli(tmp_path, monkeypatch):
    return Cli(tmp_path, monkeypatch)


@pytest.fixture
def on(cli):
    """Runs a command on a source tree."""

    def run(site: Path, *arguments: str, python: str = sys.executable):
        return cli.run(*arguments, "--host", f"local:{site}", "--python", python, "--state-dir", str(cli.state))

    return run


@pytest.fixture
def nothing_published(monkeypatch):
    monkeypatch.setattr("ddtree_deploy.deploy.status.published_hashes", lambda _root: None)


# --- git HEAD


@pytest.mark.parametrize("kind", ["sha1", "sha256"])
def test_a_checkout_is_held_against_head(cli, on, kind):
    site = checkout(cli.folder)
    os.symlink("a.py", site / "sglang/srt/link.py")
    head = commit(site.parent, f"--object-format={kind}")
    status = on(site, "status", "--json").json
    assert (status["state"], status["foreign"], status["unlisted"]) == ("pristine", [], 0)
    assert status["record"]["baseline"] == f"git HEAD {head[:12]}"
    assert status["root"]["version"] == ENGINE
    assert "hashes" not in status["record"]

    index = (site.parent / ".git/index").read_bytes()
    (site / "sglang/srt/b.py").write_text("B = 99\n")
    (site / "sglang/srt/sub/c.py").unlink()
    (site / "sglang/srt/mine.py").write_text("")
    (site / "sglang/srt/link.py").unlink()
    os.symlink("b.py", site / "sglang/srt/link.py")
    result = on(site, "status")
    assert result.status == 1
    assert f"held against git HEAD {head[:12]}: 3 changed by anyone else" in result.out
    foreign = {line["path"]: line["detail"] for line in on(site, "status", "--json").json["foreign"]}
    assert set(foreign) == {"sglang/srt/b.py", "sglang/srt/sub/c.py", "sglang/srt/link.py"}
    assert "gone" in foreign["sglang/srt/sub/c.py"]
    assert "1 file(s) that neither git HEAD" in result.err
    assert (site.parent / ".git/index").read_bytes() == index  # git only read


def test_a_set_on_a_checkout_is_no_foreign_edit(cli, on):
    site = checkout(cli.folder)
    commit(site.parent)
    patch = cli.patch("one.patch", ONE)
    assert on(site, "apply", patch).status == 0
    status = on(site, "status", "--json").json
    assert (status["state"], status["foreign"]) == ("applied", [])
    git(site, "checkout", "-q", "--", ".")  # the edit is gone, and not by us
    status = on(site, "status", "--json").json
    assert status["state"] == "drift"
    assert "back as it was" in status["sets"][0]["files"][0]["detail"]


def test_a_repository_around_that_holds_nothing_of_the_engine(cli, on, nothing_published):
    site = checkout(cli.folder)
    git(cli.folder, "init", "-q")
    (cli.folder / ".gitignore").write_text("/sglang\n/made\n/data\n/host\n/state\n")
    commit(cli.folder)
    status = on(site, "status", "--json").json
    assert (status["state"], status["record"]["baseline"]) == ("unknown", None)


def test_a_repository_that_git_will_not_read(cli, on, nothing_published):
    site = checkout(cli.folder)
    commit(site.parent)
    (site.parent / ".git/HEAD").write_text("ref: refs/heads/nowhere\n")
    result = on(site, "status")
    assert "git repository could not be asked" in result.err
    assert "foreign edits cannot be told" in result.out


def test_a_repository_s_own_programs_are_not_run(cli, on):
    """A checkout's configuration can name programs; looking at it must run none."""
    site = checkout(cli.folder)
    commit(site.parent)
    mark = cli.folder / "ran"
    trap = cli.folder / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {mark}\n")
    trap.chmod(0o755)
    for word in ("core.fsmonitor", "core.pager", "diff.external", "core.sshCommand", "filter.x.clean"):
        git(site, "config", word, str(trap))
    (site.parent / ".git/info/attributes").write_text("*.py filter=x\n")
    (site / "sglang/srt/a.py").write_text("A = 3\n")
    assert on(site, "status").status == 1
    assert not mark.exists()


def test_no_git_on_the_host(cli, on, nothing_published, monkeypatch):
    site = checkout(cli.folder)
    commit(site.parent)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no git on the host" in on(site, "status").err


# --- the published files


def test_a_tree_without_git_is_held_against_the_published_files(cli, on, monkeypatch):
    site = checkout(cli.folder)
    published = {path: hashlib.sha256(data).hexdigest() for path, data in FILES.items() if "srt" in path}
    monkeypatch.setattr("ddtree_deploy.deploy.status.published_hashes", lambda _root: published)
    status = on(site, "status", "--json").json
    assert (status["state"], status["record"]["baseline"]) == ("pristine", f"the published sglang {ENGINE}")
    (site / "sglang/srt/b.py").write_text("B = 99\n")
    result = on(site, "status")
    assert result.status == 1
    assert f"differs from the published sglang {ENGINE}" in result.out


def test_the_real_wheel_serves_where_it_is_here(wheel, wheel_site, on, cli, tmp_path, monkeypatch):
    """Unpacked without its dist-info; the wheel comes from a wheelhouse, and nothing is downloaded."""
    site = tmp_path / "python"
    site.mkdir()
    shutil.copytree(wheel_site / "sglang", site / "sglang", copy_function=os.link)
    monkeypatch.setattr("ddtree_deploy.snapshots.wheels._download", None)
    monkeypatch.setenv("DDTREE_DEPLOY_CACHE", str(tmp_path / "cache"))
    result = on(site, "status")
    assert "wheel fetch 0.5.11" in result.err
    monkeypatch.setenv("DDTREE_DEPLOY_WHEELHOUSE", str(wheel.parent))
    status = on(site, "status", "--json").json
    assert (status["state"], status["record"]["baseline"]) == ("pristine", "the published sglang 0.5.11")
    target = site / "sglang/srt/server_args.py"
    data = target.read_bytes()
    target.unlink()
    target.write_bytes(data + b"\n")
    status = on(site, "status", "--json").json
    assert [line["path"] for line in status["foreign"]] == ["sglang/srt/server_args.py"]


def test_a_damaged_or_unknown_version_has_no_published_files():
    python = {"tag": "cp312", "machine": "x86_64"}
    assert baseline.published_hashes({"version": None, "python": python}) is None
    assert baseline.published_hashes({"version": "0.0.0.dev0", "python": python}) is None


# --- a real editable install


def test_an_editable_install(cli, on, monkeypatch):
    site = checkout(cli.folder)
    (site / "pyproject.toml").write_text(PYPROJECT.format(version=ENGINE))
    head = commit(site.parent)
    prefix = cli.folder / "venv"
    venv.create(prefix, with_pip=False, symlinks=True)
    command = ["install", "-q", "--no-build-isolation", "--no-deps", "--no-index", "--prefix", str(prefix)]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_WARN_SCRIPT_LOCATION": "1"}
    subprocess.run(
        [sys.executable, "-m", "pip", *command, "-e", str(site)], check=True, env=environment, capture_output=True
    )
    python = str(prefix / "bin/python")
    inventory = cli.patch("hosts.toml", f'[hosts.here]\ncontainer = "docker:sgl"\npython = "{python}"\n')
    monkeypatch.setenv("PATH", f"{write_docker(cli.folder / 'engine').parent}:{os.environ['PATH']}")
    # Once by its folder, once found by the interpreter itself.
    for where in (["--host", f"local:{site}", "--python", python], ["--host", "here", "--inventory", inventory]):
        status = cli.run("status", *where, "--state-dir", str(cli.state), "--json").json
        assert status["root"]["site"] == str(site)
        assert (status["root"]["editable"], status["root"]["version"]) == (True, ENGINE)
        assert status["root"]["foreign_python"] is None
        assert (status["record"]["state"], status["record"]["baseline"]) == ("absent", f"git HEAD {head[:12]}")
    assert on(site, "apply", cli.patch("one.patch", ONE), python=python).status == 0
    run = [python, "-c", "from sglang.srt import a; print(a.A)"]
    assert subprocess.run(run, capture_output=True, text=True).stdout == "2\n"
    assert on(site, "rollback", "one", python=python).status == 0


# --- the verdict itself

PATHS = st.sampled_from([f"sglang/srt/{name}.py" for name in "abcdef"])
HASHES = st.dictionaries(PATHS, st.sampled_from(["1", "2", "3"]))


@given(HASHES, st.none() | HASHES, st.none() | HASHES)
def test_a_file_is_foreign_if_neither_baseline_has_it(found, published, head):
    git_said = None
    if head is not None:
        git_said = {
            "commit": "c" * 40,
            "files": len(head),
            "differs": [path for path in found if path in head and head[path] != found[path]],
            "untracked": [path for path in found if path not in head],
            "missing": [path for path in head if path not in found],
        }
    record = {"state": "absent", "differs": [], "unlisted": [], "missing": [], "hashes": found, "git": git_said}
    judged = judge(record, "1.0", published)
    known = [tree for tree in (published, head) if tree is not None]
    if not known:
        assert judged["baseline"] is None
        assert judged["differs"] == judged["unlisted"] == judged["missing"] == []
        return
    for path, digest in found.items():
        fine = any(tree.get(path) == digest for tree in known)
        listed = any(path in tree for tree in known)
        assert (path in judged["differs"]) == (listed and not fine)
        assert (path in judged["unlisted"]) == (not listed)
    assert judged["missing"] == sorted((head if head is not None else published).keys() - found.keys())


def test_a_record_speaks_for_itself():
    record = {"state": "present", "differs": ["x"], "unlisted": [], "missing": [], "files": 1}
    judged = judge(record, "1.0", {"x": "1"})
    assert judged == {**record, "baseline": RECORD, "notes": []}


@pytest.mark.parametrize(
    ("container", "root", "said"),
    [
        (None, {"container": None, "volatile": False}, False),
        (None, {"container": "docker", "volatile": True}, True),
        (None, {"container": "docker", "volatile": False}, False),  # on a volume
        ("docker:sgl", {"container": "docker", "volatile": True}, True),
        ("docker:sgl", {"container": "docker", "volatile": False}, False),
        ("docker:sgl", {"container": None, "volatile": False}, True),  # an engine that leaves no mark
    ],
)
def test_what_a_container_forgets(container, root, said):
    notes = container_notes(Target("box", "local", container=container), root)
    assert bool(notes) == said
    if said:
        assert "recreating the container loses every set" in notes[0]
