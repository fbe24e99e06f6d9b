"""The harness end to end, with an engine that is none: tests/gpu/fake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy.resources import patches_dir
from tests.gpu import report, run, sites, store

FAKE = Path(__file__).parent / "fake"


@pytest.fixture
def place(tmp_path):
    (tmp_path / "models/target").mkdir(parents=True)
    prompts = [f"prompt number {number}" for number in range(16)]
    (tmp_path / "models/prompts-text.json").write_text(json.dumps({"prompts": prompts}))
    digest = sites.set_digest(patches_dir())
    for site in sites.SET_OF_SITE:
        (tmp_path / "work").mkdir(exist_ok=True)
        (tmp_path / f"work/{site}-{digest}").symlink_to(FAKE)
    return tmp_path


def harness(place, *arguments, **env):
    return subprocess.run(
        [
            *(sys.executable, "-m", "tests.gpu.run", "--kit", FAKE, "--models", place / "models"),
            *("--work", place / "work", "--results", place / "results.jsonl", "--stagger", "0", *arguments),
        ],
        cwd=run.REPOSITORY,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def built(place):
    records = store.read([place / "results.jsonl"])
    return report.build(records.values(), sites.set_digest(patches_dir()))


def check(written, name):
    (found,) = (check for check in written["checks"] if check["name"] == name)
    return found["passed"], found["detail"]


def test_shards_side_by_side_and_nothing_twice(place):
    first = harness(place, "--only", "sync,steps,shadow", "--seconds", "100")
    assert first.returncode == 0, first.stdout + first.stderr
    written = built(place)
    assert check(written, "shadow generate/draft/graphs/1")[0]
    assert check(written, "no wait but the read-back tree31")[0]
    assert written["steps"]["round_ms"]["clock/draft-weak/8"]["timed-tree15 over chain"] > 0
    again = harness(place, "--only", "sync,steps,shadow", "--seconds", "100")
    assert "0 steps on 0 engines" in again.stdout


def test_differences_are_looked_up_once_the_other_engines_are_done(place):
    assert harness(place, "--only", "leak", "--seconds", "100", FAKE_WRONG="DDTREE").returncode == 0
    written = built(place)
    figure = written["exactness"]["tree15 generate/draft/graphs/8/leak=True / plain"]
    assert figure["differ"] == 16
    assert figure["unknown"] == 0
    assert len(figure["broken"]) == 16
    assert check(written, "leak is seen")[0]
    again = harness(place, "--only", "leak", "--seconds", "100")
    assert "0 steps on 0 engines" in again.stdout


def test_an_engine_that_fails_is_said_and_its_steps_are_left_for_the_next_part(place):
    failed = harness(place, "--only", "stops", "--seconds", "100", FAKE_CRASH="DDTREE")
    assert failed.returncode == 1
    assert "the engine failed" in failed.stdout
    assert "tree15: 0 of 1 steps, exit 1" in failed.stdout
    assert harness(place, "--only", "stops", "--seconds", "100").returncode == 0
    assert check(built(place), "stop tokens tree15")[0]


def test_the_report_says_what_was_not_run_and_fails_with_a_failed_check(place):
    harness(place, "--only", "stops", "--seconds", "100")
    file = place / "report.json"
    done = harness(place, "--report", file)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    assert written["passed"]
    assert "tree31 sync" in written["not_run"]
    assert list(written["sets"]) == ["dflash-fixes", "ddtree"]
    records = store.read([place / "results.jsonl"])
    for record in records.values():
        record["result"]["cut"][0] = record["result"]["cut"][0][:-1]
    assert not report.build(records.values(), written["set_digest"])["passed"]
    assert not report.build([], written["set_digest"])["passed"]
