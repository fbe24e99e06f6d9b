"""Whatever is missing or of another type in the facts is *not known*: a note that says so, never a failure."""

from __future__ import annotations

import copy
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_deploy.doctor.examine import examine
from ddtree_deploy.doctor.facts import Facts
from ddtree_deploy.doctor.redact import redact
from tests.doctor.cases import recorded

BASE = "rtx-pro-6000"
# Objects whose keys are names, so that one that is not there says something itself: packages, files, units, models,
# ports; and what is read by readers of its own (a model's configuration, a service's table).
NAMED = re.compile(
    r"^(packages\.(installed|requires)\.|files\.|host\.(ports|folders)\.|units\.units\.[^.]+\.service$|bus\.iommu"
    r"|models\.[^[]*\.(weights\.|config\.)|services\[\d+\]\.table|gpu\.(links|p2p)\.|deep\.(all_reduce\.ranks|imports)\.[^.]+$)"
)


def rich() -> dict:
    """The recorded host with something in every list, so that every field is read."""
    facts = recorded(BASE)
    facts["gpu"]["holders"] = [{"pid": 7, "gpu": "GPU-1", "used_mib": 900, "command": "x", "cgroup": "x.service"}]
    facts["packages"]["twice"] = [{"name": "torch", "versions": ["1", "2"]}]
    facts["host"]["ports"]["30000"] = {"address": "::", "pid": 7, "command": "x", "unit": None}
    facts["patches"]["processes"] = [{"pid": 7, "command": "x", "older": True}]
    loaded = facts["units"]["units"]["sglang-qwen.service"]["loaded"]
    loaded.update(pid=7, age=1.0, argv=["python"], restarts=1)
    rank = {"right": True, "seconds": 0.1, "error": None}
    facts["deep"] = {
        "skipped": None,
        "all_reduce": {"backend": "nccl", "bytes": 1 << 20, "seconds": 9.0, "ranks": {"0": rank}},
        "imports": {"sgl_kernel": rank},
    }
    return facts


def fields_read() -> list[str]:
    """Every field that some check reads, one of each kind: the first GPU stands for all."""
    seen: dict[str, str] = {}
    get = Facts._get

    def record(self, key):
        path = self._below(key)
        if not NAMED.search(path):
            seen.setdefault(re.sub(r"\[\d+\]", "[]", path), path)
        return get(self, key)

    Facts._get = record
    try:
        examine(rich())
    finally:
        Facts._get = get
    return sorted(seen.values())


READ = fields_read()


def parent(document, path: str):
    """The object that holds the last key of a path as the readers write it, and that key."""
    place, rest = document, path
    while True:
        # Keys may hold dots: the longest that fits is the one.
        keys = [key for key in place if rest == key or rest.startswith((key + ".", key + "["))]
        key = max(keys, key=len)
        if rest == key:
            return place, key
        place, rest = place[key], rest[len(key) :]
        if index := re.match(r"\[(\d+)\]", rest):
            place, rest = place[int(index[1])], rest[index.end() :]
        rest = rest.removeprefix(".")


def unknown_paths(facts) -> set[str]:
    return {line.partition(":")[0] for finding in examine(facts) if not finding.known for line in finding.evidence}


def test_all_is_known():
    assert unknown_paths(rich()) == set()
    assert len(READ) > 120


@pytest.mark.parametrize("path", READ)
def test_a_field_that_is_gone_or_of_another_type(path):
    for spoil in ("gone", "type"):
        facts = rich()
        place, key = parent(facts, path)
        if spoil == "gone":
            del place[key]
        else:
            place[key] = 7 if isinstance(place[key], list | dict) else ["x"]
        unknown = unknown_paths(facts)
        assert any(one.startswith(path) for one in unknown), (spoil, unknown)


def nodes(value, way=()):
    yield way
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nodes(below, (*way, key))


NODES = [way for way in nodes(rich()) if way]
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 2**63])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\x1b[2J", "\ud800", "9" * 500, "1.2.3\n", "/", "[", "12.0"]),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("error"), below, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(NODES), JUNK), min_size=1, max_size=6))
def test_anything_anywhere(changes):
    """Never an exception, and the findings can be written as JSON."""
    facts = copy.deepcopy(rich())
    for way, junk in changes:
        place = facts
        try:
            for key in way[:-1]:
                place = place[key]
            place[way[-1]] = junk
        except (TypeError, LookupError):
            continue  # an earlier change took the place away
    for finding in examine(redact(facts)) + examine(facts):
        json.dumps([finding.message, finding.evidence, finding.mend])
