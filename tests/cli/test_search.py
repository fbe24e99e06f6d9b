"""grep, find-def, snapshot, snapshots and diff as a person types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SOURCE = """\
class Worker:
    @property
    def size(self):
        return 1

    def forward(self):
        return self.size


def forward():
    return Worker().forward()
"""


@pytest.fixture
def source(cli):
    (cli.site / "sglang/srt/work.py").write_text(SOURCE)
    return cli


def on(cli, *arguments):
    return cli.run(*arguments, "--host", f"local:{cli.site}")


def test_grep_prints_path_line_text(source):
    result = on(source, "grep", "def forward")
    assert result.status == 0
    assert result.out == ("sglang/srt/work.py:6:    def forward(self):\nsglang/srt/work.py:10:def forward():\n")
    assert result.err == ""


def test_grep_without_a_match_is_1(source):
    result = on(source, "grep", "no such text")
    assert (result.status, result.out) == (1, "")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-l"], "sglang/srt/work.py\n"),
        (["-c"], "sglang/srt/work.py:3\n"),
        (["-w", "-c"], "sglang/srt/work.py:3\n"),
        (["-F", "-i", "-c"], "sglang/srt/work.py:3\n"),
        (["--exclude", "*.py"], ""),
        (["--under", "sub"], ""),
    ],
)
def test_grep_options(source, options, expected):
    assert on(source, "grep", "forward", *options).out == expected


def test_grep_context(source):
    result = on(source, "grep", "return 1", "-C", "1")
    assert result.out == (
        "sglang/srt/work.py-3-    def size(self):\nsglang/srt/work.py:4:        return 1\nsglang/srt/work.py-5-\n"
    )


def test_markup_and_escapes_in_sources_are_data(source):
    """rich would swallow `[id]`, fail on `[/tag]` and wrap at 80 columns; a pipe gets every byte as it is."""
    text = "x = 'tensor[bool] [/tag] \x1b[31mred " + "long " * 60 + "'\n"
    (source.site / "sglang/srt/odd.py").write_text(text)
    assert on(source, "grep", "tensor").out == f"sglang/srt/odd.py:1:{text}"


def test_bytes_that_are_not_utf8_come_through(source):
    (source.site / "sglang/srt/odd.py").write_bytes(b"x = '\xe9' # latin\n")
    assert on(source, "grep", "latin").out.encode("utf-8", "surrogateescape") == (
        b"sglang/srt/odd.py:1:x = '\xe9' # latin\n"
    )


@pytest.mark.parametrize("command", [["grep", "x"], ["snapshots"], ["--help"]])
def test_a_closed_pipe_is_no_error(source, command):
    (source.site / "sglang/srt/many.py").write_text("x = 1\n" * 50_000)
    arguments = command + (["--host", f"local:{source.site}"] if command[0] == "grep" else [])
    script = "import sys; from ddtree_deploy.cli.main import main; sys.argv[0] = 'ddtree-deploy'; main()"
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait() == 0
    assert err == b""


def test_find_def(source):
    result = on(source, "find-def", "forward", "--list")
    assert result.status == 0
    assert result.out.splitlines() == [
        "sglang/srt/work.py:6-7  method Worker.forward",
        "sglang/srt/work.py:10-11  function forward",
    ]


def test_find_def_narrows_and_shows_the_window(source):
    result = on(source, "find-def", "Worker.size", "--before", "1", "--after", "1")
    assert result.out.splitlines() == [
        "sglang/srt/work.py:3-4  method Worker.size  @property",
        "      2      @property",
        ">     3      def size(self):",
        "      4          return 1",
        "",
    ]


def test_find_def_without_a_definition_is_1(source):
    assert on(source, "find-def", "nowhere").status == 1


def test_a_file_that_does_not_parse_is_listed(source):
    (source.site / "sglang/srt/broken.py").write_text("def forward(:\n")
    result = on(source, "find-def", "forward", "--list")
    assert "sglang/srt/broken.py" in result.err


def test_references(source):
    result = on(source, "find-def", "Worker", "--list", "--refs")
    assert "sglang/srt/work.py:11:    return Worker().forward()  [name in forward]" in result.out


def test_snapshot_then_everything_works_from_it(source):
    first = on(source, "snapshot", "--json").json
    assert first["same"] is False
    assert first["files"] == 6
    assert first["root"]["version"] == "0.4.0"
    again = on(source, "snapshot", "--json").json
    assert (again["same"], again["snapshot"]) == (True, first["snapshot"])
    here = source.run("grep", "def forward", "--snapshot", "latest")
    assert here.out == on(source, "grep", "def forward").out
    assert source.run("grep", "def forward").out == here.out
    found = source.run("find-def", "forward", "--list", "--snapshot", first["snapshot"])
    assert found.out == on(source, "find-def", "forward", "--list").out


def test_snapshots_stay_and_can_be_compared(source):
    one = on(source, "snapshot", "--json").json["snapshot"]
    # The same size and the same times: only the hash tells.
    path = source.site / "sglang/srt/work.py"
    times = path.stat()
    path.write_text(SOURCE.replace("return 1", "return 2"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = on(source, "snapshot", "--json").json
    assert changed["changed"] == ["sglang/srt/work.py"]
    assert changed["files_fetched"] == 1
    listed = source.run("snapshots", "--json").json["snapshots"]
    assert [item["id"] for item in listed] == [one, changed["snapshot"]]
    result = source.run("diff", one, changed["snapshot"])
    assert result.status == 1
    assert "-        return 1\n+        return 2\n" in result.out
    assert source.run("diff", one, one).status == 0
    stat = source.run("diff", one, changed["snapshot"], "--stat")
    assert stat.out.split() == ["changed", "sglang/srt/work.py"]


def test_a_snapshot_laid_out(source):
    into = source.folder / "tree"
    result = on(source, "snapshot", "--into", str(into))
    assert result.status == 0, result.err
    assert (into / "sglang/srt/work.py").read_text() == SOURCE


def test_json_of_searches(source):
    hits = on(source, "grep", "def forward", "--json").json
    assert hits["schema"] == "ddtree-deploy.grep/1"
    lines = [("sglang/srt/work.py", 6), ("sglang/srt/work.py", 10)]
    assert [(hit["path"], hit["line"]) for hit in hits["hits"]] == lines
    found = on(source, "find-def", "forward", "--json").json
    assert [item["name"] for item in found["definitions"]] == ["Worker.forward", "forward"]


def test_patchset_and_inventory_commands(cli):
    sets = cli.run("patchset", "list", "--json").json["sets"]
    assert "dflash-fixes" in [item["name"] for item in sets]
    shown = cli.run("patchset", "show", "dflash-fixes", "--engine", "0.5.11")
    assert shown.status == 0
    assert "+++ b/sglang/srt/models/dflash.py" in shown.out
    listed = cli.run("inventory", "list", "--json").json
    assert listed["shipped"] is True
    assert cli.run("inventory", "check").status == 0
    assert cli.run("inventory", "show", "qwen-ddtree", "--json").json["service"]["budget"] == 15


def test_launch_prints_and_writes(cli):
    result = cli.run("launch", "--tp", "8")
    assert result.status == 0
    assert "--tp-size 8" in result.out
    assert "shipped example" in result.err
    out = cli.folder / "units"
    assert cli.run("launch", "--tp", "8", "--out", str(out)).status == 0
    assert (out / "qwen-ddtree.env").stat().st_mode & 0o777 == 0o600
    document = cli.run("launch", "--tp", "8", "--json").json
    assert "--tp-size" in document["argv"]
    json.dumps(document)
