from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given

from ddtree_deploy.authoring import gittools
from ddtree_deploy.authoring.gittools import file_diff, merge3, run_git
from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.apply import apply_diffs
from ddtree_deploy.patching.diff import parse
from ddtree_deploy.patching.filediff import Kind, reverse
from ddtree_deploy.patching.images import FileImage
from tests.patching.difftools import contents
from tests.patching.test_properties import WITH_GIT, changes

PATH = "sglang/srt/f.py"


def test_the_text_of_a_diff():
    before = b"".join(b"%d\n" % number for number in range(20))
    assert file_diff(PATH, before, before.replace(b"9\n10\n", b"nine\n10\n")) == (
        b"--- a/sglang/srt/f.py\n+++ b/sglang/srt/f.py\n@@ -7,7 +7,7 @@\n 6\n 7\n 8\n-9\n+nine\n 10\n 11\n 12\n"
    )
    assert file_diff(PATH, before, before) == b""
    assert file_diff(PATH, None, b"a\r\nb") == (
        b"--- /dev/null\n+++ b/sglang/srt/f.py\n@@ -0,0 +1,2 @@\n+a\r\n+b\n\\ No newline at end of file\n"
    )


@given(changes())
@WITH_GIT
def test_what_is_made_is_read_and_applied(change):
    before, after = change
    diffs = parse(file_diff(PATH, before, after), source="x")
    assert apply_diffs({PATH: FileImage(before)}, diffs, exact=[PATH]).images == {PATH: FileImage(after)}
    assert apply_diffs({PATH: FileImage(after)}, reverse(diffs), exact=[PATH]).images == {PATH: FileImage(before)}
    assert file_diff(PATH, before, after) == file_diff(PATH, before, after)


@given(contents())
@WITH_GIT
def test_files_come_and_go(data):
    for before, after, kind in ((None, data, Kind.CREATE), (data, None, Kind.DELETE)):
        (diff,) = parse(file_diff(PATH, before, after), source="x")
        assert diff.kind is kind
        tree = {} if before is None else {PATH: FileImage(before)}
        image = apply_diffs(tree, [diff]).images[PATH]
        assert image == (None if after is None else FileImage(after))


@pytest.mark.parametrize("path", ["sglang/a b.py", "sglang/ü.py", 'sglang/"x.py', "sglang/a\nb.py", ""])
def test_odd_names_are_refused(path):
    with pytest.raises(DeployError) as caught:
        file_diff(path, b"a\n", b"b\n")
    assert caught.value.code == "DD105"
    assert caught.value.message.isprintable()


def test_merge():
    base = b"".join(b"%d\n" % number for number in range(12))
    ours, theirs = base.replace(b"2\n", b"two\n", 1), base.replace(b"8\n", b"eight\n")
    merged = merge3(base, ours, theirs)
    assert (merged.conflicts, merged.data) == (0, ours.replace(b"8\n", b"eight\n"))
    torn = merge3(base, ours, base.replace(b"2\n", b"zwei\n", 1), ("here", "before", "there"))
    assert torn.conflicts == 1
    assert b"<<<<<<< here\ntwo\n||||||| before\n2\n=======\nzwei\n>>>>>>> there\n" in torn.data
    assert merge3(base, base, theirs).data == theirs
    assert merge3(base, theirs, theirs) == merge3(theirs, theirs, theirs)
    many = b"".join(b"%d\n\n\n\n" % number for number in range(300))
    assert merge3(many, many.replace(b"1", b"x"), many.replace(b"1", b"y")).conflicts == 127
    with pytest.raises(DeployError) as caught:
        merge3(b"\0\0\n", b"\0a\n", b"\0b\n")
    assert caught.value.code == "DD104"


def test_nobodys_configuration_has_a_say(tmp_path, monkeypatch):
    """Neither the user's, nor that of a repository around, nor attributes, nor variables."""
    hostile = (
        "[diff]\n noprefix = true\n algorithm = patience\n context = 9\n external = false\n[color]\n ui = always\n"
    )
    (tmp_path / ".gitconfig").write_text(hostile)
    (tmp_path / "repository").mkdir()
    before = b"class A:\n    def f(self):\n" + b"".join(b"        x%d\n" % number for number in range(9))
    after = before.replace(b"x8", b"y")
    wanted = file_diff(PATH, before, after)
    assert b"@@ class A:\n" in wanted
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "repository", check=True)
    (tmp_path / "repository" / ".git" / "config").write_text("[core]\n repositoryformatversion = 0\n" + hostile)
    (tmp_path / "repository" / ".gitattributes").write_text("* diff=python\n")
    monkeypatch.chdir(tmp_path / "repository")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "repository"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "diff.noprefix")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    assert file_diff(PATH, before, after) == wanted
    assert merge3(b"a\n", b"b\n", b"a\n").data == b"b\n"


def test_no_git_and_an_old_git(tmp_path, monkeypatch):
    gittools._check_version.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeployError) as caught:
        file_diff(PATH, b"a\n", b"b\n")
    assert (caught.value.code, caught.value.hint) == ("DD009", "install git")
    (tmp_path / "git").write_text("#!/bin/sh\necho git version 2.25.1\n")
    (tmp_path / "git").chmod(0o755)
    with pytest.raises(DeployError) as caught:
        merge3(b"", b"", b"")
    assert "git 2.32 or later is needed, this is 'git version 2.25.1'" in caught.value.message
    gittools._check_version.cache_clear()


def test_a_failure_is_one_line(tmp_path):
    with pytest.raises(DeployError) as caught:
        run_git(("cat-file", "-p", "HEAD"), folder=tmp_path, repository=True)
    assert caught.value.code == "DD009"
    assert "git cat-file failed in" in caught.value.message
    assert os.linesep not in caught.value.message
