"""The readers of facts take what they are named after, and nothing else."""

from __future__ import annotations

import pytest

from ddtree_deploy.doctor.facts import Facts, NotKnown

FACTS = Facts(
    {
        "text": "x",
        "one": 1,
        "half": 0.5,
        "yes": True,
        "none": None,
        "list": ["a", 1],
        "texts": ["a", "b"],
        "numbers": [1, 2],
        "table": {"a": {"b": 1}, "gone": None},
        "failed": {"error": "why not"},
        "huge": 10**400,
        "infinite": float("inf"),
        "nan": float("nan"),
    }
)


@pytest.mark.parametrize(
    ("reader", "key", "value"),
    [
        ("text", "text", "x"),
        ("number", "half", 0.5),
        ("integer", "one", 1),
        ("flag", "yes", True),
        ("texts", "texts", ["a", "b"]),
        ("integers", "numbers", [1, 2]),
        ("maybe", "none", None),
        ("maybe_text", "none", None),
        ("maybe_text", "text", "x"),
        ("maybe_texts", "none", None),
        ("maybe_number", "none", None),
        ("maybe_integer", "none", None),
        ("maybe_flag", "none", None),
    ],
)
def test_well(reader, key, value):
    assert getattr(FACTS, reader)(key) == value


@pytest.mark.parametrize(
    ("reader", "keys"),
    [
        ("text", "one yes none list table"),
        ("number", "text yes none huge infinite nan"),
        ("integer", "half yes none huge infinite nan text"),
        ("flag", "one none text"),
        ("texts", "list numbers text none"),
        ("integers", "list texts half"),
        ("at", "list text none absent"),
        ("items", "list texts table failed"),
        ("table", "list text none"),
        ("words", "numbers text"),
        ("maybe_flag", "one"),
    ],
)
def test_not_known(reader, keys):
    for key in keys.split():
        with pytest.raises(NotKnown) as unknown:
            getattr(FACTS, reader)(key)
        assert unknown.value.path.partition("[")[0] == key


def test_why():
    with pytest.raises(NotKnown, match=r"^failed: why not$"):
        FACTS.at("failed").text("anything")
    with pytest.raises(NotKnown, match=r"^failed: why not$"):
        FACTS.items("failed")
    with pytest.raises(NotKnown, match=r"^table.a.c: was not gathered$"):
        FACTS.at("table").at("a").text("c")


def test_a_table_leaves_out_what_is_none():
    assert list(FACTS.table("table")) == ["a"]
