"""Every JSON document keeps its shape, and docs/json.md describes it."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests.cli import scenario, schemas
from tests.cli.schemas import FOLDER, PAGE, Recorded
from tests.cli.shapes import Shape, Shapes

PACKAGE = Path(__file__).parents[2] / "ddtree_deploy"
UPDATE = bool(os.environ.get("DDTREE_DEPLOY_UPDATE_CASES"))
KINDS, PARTS = (sorted(path.stem for path in folder.glob("*.json")) for folder in (FOLDER, FOLDER / "parts"))
CHANGED = (
    "a shape changed. A key that went, or a type that changed, raises the version in its schema; then, as "
    "after keys that were added: DDTREE_DEPLOY_UPDATE_CASES=1 pytest tests/cli/test_schemas.py, and say in "
    "tests/cases/schemas what each new key is"
)


def shapes_of(documents: dict[str, list[dict]]) -> dict[str, tuple[Recorded, Shape]]:
    """name -> (what is recorded, what was found), of kinds and of parts."""
    found: dict[str, tuple[Recorded, Shape]] = {}
    met: dict[str, list[dict]] = {}
    for kind in sorted({*KINDS, *documents}):
        recorded = schemas.read(FOLDER / f"{kind}.json")
        collector = recorded.shapes()
        found[kind] = recorded, collector.of(documents.get(kind, []))
        for part, values in collector.met.items():
            met.setdefault(part, []).extend(values)
    for part in PARTS:  # parts in parts
        collector = schemas.read(FOLDER / f"parts/{part}.json").shapes()
        collector.of(met.get(part, []))
        for inner, values in collector.met.items():
            met.setdefault(inner, []).extend(values)
    for part in sorted({*PARTS, *met}):
        recorded = schemas.read(FOLDER / f"parts/{part}.json")
        found[f"parts/{part}"] = recorded, recorded.shapes().of(met.get(part, []))
    return found


def test_every_document_keeps_its_shape(tmp_path, monkeypatch):
    """One test: under xdist several would run the scenario in several processes."""
    documents = scenario.the_day(tmp_path, monkeypatch)
    shapes = shapes_of(documents)
    if UPDATE:
        for recorded, shape in shapes.values():
            recorded.update(dict(shape))
        PAGE.write_text(schemas.page())
    changed = {name: recorded.differences(shape) for name, (recorded, shape) in shapes.items()}
    assert not {name: lines for name, lines in changed.items() if lines}, CHANGED
    for kind, printed in documents.items():
        assert {item["schema"] for item in printed} == {f"ddtree-deploy.{kind}/{shapes[kind][0].version}"}


def test_every_document_in_the_code_is_recorded():
    """By syntax tree: no module prints a kind that is not documented, and none is documented that nobody prints."""
    printed = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        printed |= kinds_in(ast.parse(path.read_text()), path.name)
    assert sorted(printed) == KINDS


def kinds_in(tree: ast.Module, where: str) -> set[str]:
    """The first arguments of every ``document`` and ``outcome`` of a console."""
    found = set()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if getattr(call.func, "attr", None) not in ("document", "outcome") or len(call.args) < 2:
            continue
        kind = call.args[0]
        if isinstance(kind, ast.Constant):
            found.add(kind.value)
        elif isinstance(kind, ast.JoinedStr):
            (function,) = (item for item in functions if call in ast.walk(item))
            found |= {ast.unparse(kind).strip("f'\"").replace("{command}", word) for word in words_for(tree, function)}
        else:  # the console itself hands on what it was given
            assert where == "console.py", f"{where}:{call.lineno}: the kind is not said where it is printed"
    return found


def words_for(tree: ast.Module, function: ast.FunctionDef) -> list[str]:
    """What the function's argument ``command`` is at each of its calls in the module."""
    at = [argument.arg for argument in function.args.args].index("command")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == function.name]
    return [ast.literal_eval(call.args[at]) for call in calls]


def test_a_kind_that_is_nowhere_documented_is_found():
    code = (
        "def f(console, command): console.document(f'x-{command}', {})\n"
        "f(c, 'a')\nf(c, 'b')\nc.console.outcome('z', {}, None)"
    )
    assert kinds_in(ast.parse(code), "x.py") == {"x-a", "x-b", "z"}
    with pytest.raises(AssertionError, match=r"x\.py:1: the kind is not said"):
        kinds_in(ast.parse("console.document(kind, {})"), "x.py")


def test_everything_is_described():
    kinds, parts = schemas.kinds(), schemas.parts()
    for name, recorded in [*kinds.items(), *parts.items()]:
        assert recorded.about, name
        assert recorded.exit or name in parts, name
        for path, (_types, about) in recorded.fields.items():
            told = about or recorded.explained or path.endswith(("[]", "{}"))
            assert told, f"{name}: {path} has no description"
        for path in (*recorded.maps, *recorded.opaque, *recorded.parts, *recorded.varies, *recorded.also):
            assert path in recorded.fields, f"{name}: there is no {path}"


def test_the_page_says_the_same():
    assert PAGE.read_text() == schemas.page(), "make it anew: DDTREE_DEPLOY_UPDATE_CASES=1"


@pytest.mark.parametrize(
    ("values", "differences"),
    [
        ([{"a": 1}, {"a": 2}], []),
        ([{"a": 1, "b": 1}], ["b: recorded no, now integer"]),
        ([{"a": 1}, {}], ["a: recorded integer, now integer | absent"]),
        ([{"a": 1.5}], ["a: recorded integer, now number"]),
        ([{"a": None}], ["a: recorded integer, now null"]),
        ([{"a": {"c": 1}}], ["a: recorded integer, now object", "a.c: recorded no, now integer"]),
        ([{"a": [1]}], ["a: recorded integer, now array", "a[]: recorded no, now integer"]),
        ([{}], ["a: recorded integer, now no"]),
    ],
)
def test_a_change_is_seen(values, differences):
    recorded = Recorded(Path("x.json"), fields={"a": ["integer", "a number"]})
    assert recorded.differences(Shapes().of(values)) == differences


def test_maps_parts_and_what_varies():
    shapes = Shapes(maps=["m"], opaque=["o"], parts={"p": "part", "l[]": "part"})
    value = {"m": {"x": 1, "y": "z"}, "o": {"any": 1}, "p": {"q": 1}, "l": [{"q": "r"}]}
    assert shapes.of([value]) == {
        "l": ["array"],
        "l[]": ["part"],
        "m": ["map"],
        "m{}": ["integer", "string"],
        "o": ["object"],
        "p": ["part"],
    }
    assert shapes.met == {"part": [{"q": 1}, {"q": "r"}]}
    recorded = Recorded(Path("x.json"), varies=["a"], fields={"a": ["integer | null", ""]})
    assert not recorded.differences({"a": ["null"]})
    assert recorded.differences({})
    assert recorded.differences({"a": ["string"]})
    recorded.also = {"a": "string"}
    assert not recorded.differences({"a": ["string"]})
