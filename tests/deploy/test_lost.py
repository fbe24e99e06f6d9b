"""The engine was installed anew under applied sets: what is left, what is said, and what `apply` does about it."""

from __future__ import annotations

import shutil

import pytest

from tests.agent.harness import FILES, tree_of
from tests.deploy.sets import SRT, Desk
from tests.deploy.test_upgrade import A1, A2, A3, B1, B2, N1, N2, refused

T = b"T = 1\n"


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path)
    desk.write("base", "1.0", {"a.py": (A1, A2), "b.py": (B1, B2), "new/n.py": (None, N1)})
    desk.write("top", "1.0", {"a.py": (A2, A3), "new/t.py": (None, T)}, ["base"])
    desk.apply("top")
    return desk


def install(desk: Desk, version: str, changed: dict[str, bytes | None] | None = None) -> dict[str, tuple]:
    """What pip does: the files of the old RECORD go, those of the new one come; what nobody listed stays."""
    site = desk.host.site
    (old,) = site.glob("sglang-*.dist-info")
    for line in (old / "RECORD").read_text().splitlines():
        (site / line.split(",")[0]).unlink(missing_ok=True)
    shutil.rmtree(old)
    wanted = {**FILES, **{SRT + path: data for path, data in (changed or {}).items()}}
    info = site / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n\n")
    (info / "INSTALLER").write_text("pip\n")
    for path, data in wanted.items():
        if data is not None:
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_bytes(data)
            (site / path).chmod(0o644)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path, data in wanted.items() if data is not None))
    return tree_of(site)


def test_the_same_version_anew(desk):
    """T43. The added files are still there: neither drift nor partly applied."""
    done = tree_of(desk.host.site)
    install(desk, "0.5.11")
    lines = {line.name: line for line in desk.status().sets}
    assert {line.state for line in lines.values()} == {"reinstalled"}
    assert lines["base"].detail == ("sglang was installed anew (then 0.5.11, now 0.5.11); `apply base` puts it back")
    assert [file.path for file in lines["base"].files if "still there" in file.detail] == [SRT + "new/n.py"]
    applied = desk.apply("top")
    assert applied.ground.lost == ("base", "top")
    assert applied.ground.replaced == {}
    assert tree_of(desk.host.site) == done
    assert desk.history()[-1] == "apply base 1.0, top 1.0"
    assert desk.status().state == "applied"
    desk.rollback("base", with_dependents=True)
    assert (desk.read("new/n.py"), desk.read("new/t.py"), desk.read("a.py")) == (None, None, A1)


def test_another_version_of_the_set_takes_the_leftovers_away(desk):
    install(desk, "0.5.11")
    desk.write("base", "2.0", {"a.py": (A1, A2), "new/n.py": (None, N2)})
    desk.write("top", "2.0", {"a.py": (A2, A3)}, ["base"])
    desk.apply("top")
    assert (desk.read("new/n.py"), desk.read("new/t.py"), desk.read("b.py")) == (N2, None, B1)
    assert desk.line("base").back == ("1.0",)
    desk.rollback("base", "1.0", with_dependents=True)
    assert (desk.read("new/n.py"), desk.read("b.py"), desk.read("a.py")) == (N1, B2, A3)
    assert desk.applied() == {"base": "1.0", "top": "1.0"}
    # It is of the present install again: edits of all its files are edits, and no reinstall.
    for path in ("a.py", "b.py"):
        (desk.host.site / SRT / path).write_bytes(b"MINE = 1\n")
    assert desk.line("base").state == "drift"


def test_an_edited_leftover_is_drift(desk):
    install(desk, "0.5.11")
    (desk.host.site / SRT / "new/n.py").write_bytes(b"MINE = 1\n")
    error = refused("DD101", desk.apply, "top")
    assert "new/n.py" in "\n".join((error.message, *error.details))
    assert desk.read("new/n.py") == b"MINE = 1\n"


def test_a_file_that_the_new_engine_brings_is_not_taken_for_a_leftover(desk):
    """The engine now has the very file that the set added: it is the installer's, and stays."""
    install(desk, "0.5.12", {"new/n.py": N1})
    desk.write("base", "1.1", {"a.py": (A1, A2)}, engine="0.5.12")
    desk.apply("base")
    assert desk.read("new/n.py") == N1
    assert desk.read("new/t.py") is None


def test_the_family_of_the_new_engine_is_taken(desk):
    new_a = b"A = 1\nNEW = 1\n"
    pristine = install(desk, "0.5.12", {"a.py": new_a})
    desk.write("base", "1.1", {"a.py": (new_a, new_a + A2), "new/n.py": (None, N1)}, engine="0.5.12")
    detail = desk.line("base").detail
    assert detail == "sglang was installed anew (then 0.5.11, now 0.5.12); 1.1 has a family for that"
    applied = desk.apply("base")
    assert [layer.status.family.name for layer in applied.plan.layers] == ["0.5.12"]
    assert desk.read("a.py") == new_a + A2
    # What was applied to another engine is no way back; what was built on the set is gone with it.
    assert desk.line("base").back == ()
    refused("DD115", desk.rollback, "base", "1.0")
    assert desk.applied() == {"base": "1.1"}
    desk.rollback("base")
    assert set(tree_of(desk.host.site)) == {path for path in pristine if "new" not in path}


def test_a_version_for_another_engine_is_no_way_back_even_where_it_fits(desk):
    install(desk, "0.5.12")
    desk.write("base", "1.1", {"a.py": (A1, A3)}, engine="0.5.12")
    desk.apply("base")
    assert desk.line("base").back == ()
    error = refused("DD115", desk.rollback, "base", "1.0")
    assert error.message.endswith("it was applied to sglang 0.5.11, and this is 0.5.12")
    assert "`apply`" in error.hint


def test_without_a_family_the_refusal_says_what_changed(desk):
    before = b"def f():\n    return 1\n\n\ndef g():\n    return 1\n\n\ndef h():\n    return 1\n"
    desk.rollback("base", with_dependents=True)
    install(desk, "0.5.11", {"f.py": before, "g.py": before, "gone.py": before, "data.json": b"{}\n"})
    mine = before.replace(b"f():\n    return 1", b"f():\n    return 2")
    files = {"f.py": (before, mine), "g.py": (before, mine), "gone.py": (before, mine), "b.py": (B1, B2)}
    added = {"new/n.py": (None, N1), "new/left.py": (None, N1)}
    desk.write("base", "1.0", {**files, "data.json": (b"{}\n", b"[]\n"), **added})
    desk.apply("base")
    theirs = before.replace(b"return 1", b"return 3").replace(b"def h", b"def i")
    changed = {
        "f.py": theirs,
        "g.py": b"# upstream says so\n" + before,
        "data.json": b"[1]\n",
        "new/n.py": N2,
        "gone.py": None,
    }
    old = install(desk, "0.5.13", changed)
    assert desk.line("base").detail.endswith("no family for that is known here: `apply base --check` says what changed")
    error = refused("DD109", desk.apply, "base")
    assert error.message.startswith("base: no family serves 0.5.13, only 0.5.11")
    assert error.hint == ("bring the set to this engine: ddtree-deploy patchset port base --from 0.5.11 --to 0.5.13")
    assert error.details == (
        "of the files of base, applied to sglang 0.5.11, these are others in 0.5.13:",
        f"{SRT}data.json: changed",
        f"{SRT}f.py: changed in f, which the set changes too; and g, h, i",
        f"{SRT}g.py: changed in comments alone",
        f"{SRT}gone.py: gone",
        f"{SRT}new/n.py: comes with the engine now, and the set adds it",
        "2 more are as they were",
    )
    assert tree_of(desk.host.site) == old
    assert desk.session.calls[-1] == "stored"
    # Where the host's copies are gone the hash still tells that a file changed.
    shutil.rmtree(desk.host.state / "objects")
    (desk.host.state / "objects").mkdir()
    assert f"{SRT}f.py: changed" in refused("DD109", desk.apply, "base").details


def test_a_set_that_the_new_engine_does_not_need(desk):
    install(desk, "0.5.12")
    desk.write("base", "1.1", {"a.py": (A1, A2)}, unneeded=["0.5.12"])
    assert desk.line("base").detail.endswith("; not needed on 0.5.12: upstream has it")
    assert not desk.apply("base").to_do


def test_a_version_that_is_not_needed_any_more_goes(desk):
    """The new version of an applied set says that this engine needs nothing of it."""
    desk.rollback("top")
    desk.write("base", "1.1", {"a.py": (A1, A2)}, engine="0.5.12", unneeded=["0.5.11"])
    assert "not needed on this engine" in desk.line("base").detail
    applied = desk.apply("base")
    assert applied.ground.replaced == {"base": "1.0"}
    assert desk.applied() == {}
    assert (desk.read("a.py"), desk.read("new/n.py")) == (A1, None)
    assert desk.history()[-1] == "apply base 1.0 undone"


def test_rollback_to_a_version_of_a_lost_set_is_refused(desk):
    desk.write("base", "2.0", {"a.py": (A1, A2), "new/n.py": (None, N2)})
    desk.apply("base")
    install(desk, "0.5.11")
    refused("DD113", desk.rollback, "base", "1.0", with_dependents=True)
    refused("DD113", desk.rollback, "base", "1.0", with_dependents=True, force=True)
