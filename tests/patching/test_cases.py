"""Every diff of ``tests/cases/diffs``, through the reader and applier and through the planner."""

from __future__ import annotations

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.patching.apply import apply_diffs
from ddtree_deploy.patching.classify import touched_paths
from ddtree_deploy.patching.diff import parse
from ddtree_deploy.patching.filediff import reverse
from ddtree_deploy.patching.patchset import adhoc_set
from ddtree_deploy.patching.plan import plan

from .cases import CASES

BY_NAME = {case.name: case for case in CASES}


def test_there_are_the_44_and_more():
    assert len(CASES) > 44 + 20
    assert len(BY_NAME) == len(CASES)


def present(images):
    return {path: image for path, image in images.items() if image is not None}


def check_refusal(case, error):
    text = "\n".join([error.message, *error.details])
    for said in case.says:
        assert said in text
    assert error.code.startswith(("DD10", "DD509"))
    assert "\n" not in error.message and error.message.isprintable()
    assert all(line.isprintable() for line in error.details)


@pytest.mark.parametrize("name", BY_NAME)
def test_applier(name):
    case = BY_NAME[name]
    before = dict(case.files)
    try:
        diffs = parse(case.patch, strip=case.strip, source="x.patch")
        result = apply_diffs(case.files, diffs)
    except DeployError as error:
        assert case.want is None, error.message
        check_refusal(case, error)
        assert case.files == before
        return
    after = {**case.files, **result.images}
    assert present(after) == case.want
    undone = apply_diffs(after, reverse(diffs), exact=after)
    assert present({**after, **undone.images}) == present(before) or "same bytes" in name


@pytest.mark.parametrize("name", BY_NAME)
def test_planner(name):
    case = BY_NAME[name]
    try:
        patch_set = adhoc_set("case", [("x.patch", case.patch, case.strip)])
        images = dict.fromkeys(touched_paths([patch_set])) | case.files
        planned = plan([patch_set], "0.5.11", images)
    except DeployError as error:
        assert case.want is None, error.message
        check_refusal(case, error)
        return
    changes = planned.changes
    assert {path: change.before for path, change in changes.items()} == {path: case.files.get(path) for path in changes}
    after = case.files | {path: change.after for path, change in changes.items()}
    assert present(after) == case.want
