"""``explain``: every code has its words, and docs/codes.md is made of the same."""

from __future__ import annotations

import os
import re
import textwrap
import tomllib
from importlib import resources
from itertools import groupby
from pathlib import Path

import pytest

from ddtree_deploy import errors
from ddtree_deploy.cli.main import _command
from ddtree_deploy.doctor import codes as doctor
from ddtree_deploy.explanations import FILE, Explanation, explanations
from tests.cli.harness import Cli

PAGE = Path(__file__).parents[2] / "docs/codes.md"
AREAS = {
    "0": "Usage and inventory",
    "1": "Patches and the host's tree",
    "2": "The doctor's findings",
    "3": "Connection and agent",
    "4": "Snapshots and wheels",
    "5": "Transactions",
    "6": "Launch and services",
    "9": "Internal",
}
HEAD = """\
# Codes

Every error and every finding of the doctor has a code that never changes its meaning. `ddtree-deploy explain CODE`
says the same on the command line, and `explain --json` as data. This page is made from
`ddtree_deploy/explanations.toml`; the exit statuses are explained in the README.
"""

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
FOREIGN = {"--help", "--no-deps", "--link-mode", "--shm-size", "--now"}  # of other programs, or of every command


def texts(item: Explanation) -> tuple[str, ...]:
    return (item.means, *item.causes, *item.mends)


def test_every_code_is_explained_and_nothing_else():
    told = tomllib.loads(resources.files("ddtree_deploy").joinpath(FILE).read_text())
    assert set(told) == set(errors.CODES) | set(doctor.CODES)
    assert not set(errors.CODES) & set(doctor.CODES)


def test_the_words_are_whole_sentences():
    for item in explanations().values():
        assert item.causes, item.code
        assert item.mends, item.code
        for text in texts(item):
            assert re.fullmatch(r"\S[^\n]*\.", text), (item.code, text)
            assert text.count("`") % 2 == 0, (item.code, text)
        assert len(set(texts(item))) == len(texts(item)), item.code


def options_of_commands() -> dict[str, set[str]]:
    """Every command, and every command of a group, with its options."""
    command = _command()
    found = {}
    for name in command.list_commands(None):
        item = command.get_command(None, name)
        leaves = {name: item} | {f"{name} {key}": leaf for key, leaf in getattr(item, "commands", {}).items()}
        for path, leaf in leaves.items():
            found[path] = {option for param in leaf.params for option in (*param.opts, *param.secondary_opts)}
    return found


def test_the_commands_and_options_that_are_named_exist():
    known = options_of_commands()
    every = set().union(*known.values(), FOREIGN)
    for item in explanations().values():
        for text in texts(item):
            assert set(OPTION.findall(text)) <= every, (item.code, text)
            for words in re.findall(r"`([^`]*)`", text):
                names = words.removeprefix("ddtree-deploy ").split()
                path = next((path for path in (" ".join(names[:2]), names[0]) if path in known), None)
                assert path or names[0] == "COMMAND" or "ddtree-deploy" not in words, (item.code, words)
                assert path is None or set(OPTION.findall(words)) <= known[path], (item.code, words)


def wrapped(text: str, bullet: str = "") -> str:
    return textwrap.fill(
        bullet + text, 120, subsequent_indent=" " * len(bullet), break_long_words=False, break_on_hyphens=False
    )


def page() -> str:
    """docs/codes.md."""
    lines = [HEAD]
    for key, items in groupby(explanations().values(), key=lambda item: item.code[2]):
        lines.append(f"## {AREAS[key]}\n")
        for item in items:
            where = f"Exit status {item.exit_status}." if item.area is None else f"The doctor, area {item.area}."
            lines += [f"### {item.code}: {item.title}\n", wrapped(f"{where} {item.means}"), "", "Usual causes:\n"]
            lines += [*(wrapped(cause, "- ") for cause in item.causes), "", "What to do:\n"]
            lines += [*(wrapped(mend, "- ") for mend in item.mends), ""]
    return "\n".join(lines).rstrip() + "\n"


def test_the_page_says_the_same():
    if os.environ.get("DDTREE_DEPLOY_UPDATE_CASES"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "make it anew: DDTREE_DEPLOY_UPDATE_CASES=1 pytest tests/cli/test_explain.py"


@pytest.mark.parametrize("word", ["DD101", "dd101", "101", "error[DD101]", "error[DD101]:", " DD101 "])
def test_however_a_code_is_written(cli: Cli, word: str):
    result = cli.run("explain", word)
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith(
        "DD101  the host's file is not what the set expects (drift)\nexit status 3 (refused)\n"
    )
    assert "usual causes:\n  - " in result.out
    assert "what to do:\n  - " in result.out
    assert max(map(len, result.out.splitlines())) <= 100


def test_a_finding_of_the_doctor(cli: Cli):
    result = cli.run("explain", "DD250")
    assert "a check of the doctor (links); the exit status is 1 where a check finds an error\n" in result.out
    assert cli.run("explain", "dd250", "--json").json["exit_status"] is None


@pytest.mark.parametrize("word", ["DD199", "DDD101", "", "x" * 3000, "DD101 DD102", "\x1b[31m", "DD१०१"])
def test_a_code_that_is_none(cli: Cli, word: str):
    result = cli.run("explain", word)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("error[DD001]: there is no code")
    assert "\x1b" not in result.err
    assert "hint: `ddtree-deploy explain` lists all" in result.err


def test_did_you_mean(cli: Cli):
    assert "did you mean 'DD101'?" in cli.run("explain", "DDD101").err


def test_all_of_them(cli: Cli):
    listed = cli.run("explain").out.splitlines()
    assert listed[0].split() == ["CODE", "EXIT", "TITLE"]
    assert [line.split()[0] for line in listed[1:]] == sorted({*errors.CODES, *doctor.CODES})
    assert [item["code"] for item in cli.run("explain", "--json").json["codes"]] == [
        line.split()[0] for line in listed[1:]
    ]
