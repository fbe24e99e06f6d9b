"""grep and find-def: pure on their cases, and as the operations that the agent runs on a live tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.agent.definitions import FindOptions, find_def
from ddtree_deploy.agent.grep import GrepOptions, compile_pattern, grep
from ddtree_deploy.agent.literals import needles
from ddtree_deploy.agent.protocol import AgentError
from ddtree_deploy.agent.selection import Selection, glob_pattern
from ddtree_deploy.agent.walk import is_built, read_file, walk
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.local import LocalTransport
from ddtree_deploy.hosts.session import HostSession
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.snapshots.search import Where, find_host, grep_host

CASES = Path(__file__).parent.parent / "cases" / "search"
FOUR = "update_mamba_state_after_mtp_verify|mamba_track_indices|TARGET_VERIFY|disable_state_update"
SYMBOL = "update_mamba_state_after_mtp_verify"


def _load(kind: str, table: str) -> list:
    found = []
    for path in sorted((CASES / kind).glob("*.toml")):
        case = tomllib.loads(path.read_text("utf-8"))
        for number, query in enumerate(case[table]):
            found.append(pytest.param(case, query, id=f"{path.stem}-{number}"))
    return found


def _pick(query: dict, *names: str) -> dict:
    return {name: query[name] for name in names if name in query}


@pytest.mark.parametrize(("case", "query"), _load("find", "find"))
def test_find_case(case: dict, query: dict):
    least = tuple(int(part) for part in case.get("least", "3.8").split("."))
    path = case.get("path", "sglang/srt/m.py")
    data = case["source"].encode(case.get("encoding", "utf-8"))
    request = _pick(query, "symbol", "before", "after", "whole")
    request["refs"] = "refs" in query
    if "error" in query:
        with pytest.raises(AgentError, match=re.escape(query["error"])) as caught:
            FindOptions.parse(request)
        assert caught.value.code == "DD008"
        return
    found = find_def([(path, data)], FindOptions.parse(request))
    if sys.version_info < least:
        assert [item.path for item in found.unparsed] == [path]
        return
    assert [f"{item.kind} {item.name} {item.line}-{item.end}" for item in found.definitions] == query["want"]
    first = found.definitions[0] if found.definitions else None
    for name in ("decorators", "body", "body_line"):
        if name in query:
            assert first is not None
            assert getattr(first, name) == query[name]
    if "refs" in query:
        assert [f"{item.label} {item.line} {item.scope or '-'}" for item in found.references] == query["refs"]
    if "unparsed" in query:
        (unparsed,) = found.unparsed
        assert unparsed.path == path
        assert query["unparsed"] in unparsed.reason
    else:
        assert found.unparsed == []


def _tree(folder: Path, case: dict) -> Path:
    site = folder / "site"
    (site / "sglang" / "srt").mkdir(parents=True)
    for path, text in case["files"].items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode(case.get("encoding", "utf-8")))
    return site


GREP_OPTIONS = ("pattern", "fixed", "ignore_case", "word", "before", "after", "files_only", "count")


@pytest.mark.parametrize(("case", "query"), _load("grep", "grep"))
def test_grep_case(case: dict, query: dict):
    def run() -> list[str]:
        selection = Selection.parse(query)
        present = {
            str(place) for path in case["files"] for place in (PurePosixPath(path), *PurePosixPath(path).parents)
        }
        starts = selection.starts(["sglang/srt", "sglang/jit_kernel"], present.__contains__)
        files = [
            (path, text.encode(case.get("encoding", "utf-8")))
            for path, text in sorted(case["files"].items())
            if any(path == start or path.startswith(start + "/") for start in starts) and selection.wants(path)
        ]
        options = GrepOptions.parse(_pick(query, *GREP_OPTIONS))
        return [
            hit.render().encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            for hit in grep(files, options)
        ]

    if "error" in query:
        with pytest.raises(AgentError, match=re.escape(query["error"])) as caught:
            run()
        assert caught.value.code == "DD008"
    else:
        assert run() == query["output"]


def test_deep_nesting_is_listed_and_does_not_end_the_search():
    deep = b"target = " + b"-" * 100_000 + b"1\n"
    found = find_def([("a.py", deep), ("b.py", b"target = 1\n")], FindOptions("target"))
    assert [(item.path, item.reason.rpartition(": ")[2]) for item in found.unparsed] == [
        ("a.py", "it is nested too deeply")
    ]
    assert [(item.path, item.kind) for item in found.definitions] == [("b.py", "name"), ("a.py", "unparsed")]


def test_long_chain_does_not_exhaust_the_stack():
    chain = b"target = " + b"+".join([b"1"] * 900) + b"\nx = a" + b".b" * 400 + b".target\n"
    found = find_def([("a.py", chain)], FindOptions("target", refs=True))
    assert [item.kind for item in found.definitions] == ["name"]
    assert [item.label for item in found.references] == ["attribute"]


def test_order_is_by_rank_then_path_bytes_then_line():
    def source(text: str) -> bytes:
        return text.encode()

    files = [
        ("sglang/srt/z.py", source("f = 1\n")),
        ("sglang/srt/é.py", source("def f(): pass\n")),
        ("sglang/srt/b.py", source("from z import f\ndef f(): pass\n")),
        ("sglang/srt/b/x.py", source("class f: pass\n")),
    ]
    found = find_def(files, FindOptions("f")).definitions
    assert [(item.path.rpartition("srt/")[2], item.kind) for item in found] == [
        ("b.py", "function"),
        ("b/x.py", "class"),
        ("é.py", "function"),
        ("z.py", "name"),
        ("b.py", "import"),
    ]


# The prefilter.

_ATOM = st.sampled_from(
    ["a", "b", "ab", "k", "s", "S", "é", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", r"\b", "^", "$", " ", "_x", "ſ"]
)


def _join(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(children, min_size=1, max_size=4).map("".join),
        st.lists(children, min_size=2, max_size=3).map(lambda parts: "(?:" + "|".join(parts) + ")"),
        st.tuples(children, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,3}?", "+?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        children.map(lambda text: f"({text})"),
        children.map(lambda text: f"(?={text})"),
        children.map(lambda text: f"(?!{text})"),
        children.map(lambda text: f"(?i:{text})"),
        children.map(lambda text: f"{text}|"),
    )


PATTERNS = st.recursive(_ATOM, _join, max_leaves=12)
TEXTS = st.text(alphabet="abkKsSſéxX_. 1\nABİ\u212a", max_size=40)


@settings(max_examples=400, deadline=None)
@given(pattern=PATTERNS, texts=st.lists(TEXTS, max_size=4), ignore_case=st.booleans(), word=st.booleans())
def test_prefilter_changes_nothing(pattern: str, texts: list[str], ignore_case: bool, word: bool):
    files = [(f"f{number}", text.encode()) for number, text in enumerate(texts)]
    options = {"ignore_case": ignore_case, "word": word}
    try:
        fast, slow = GrepOptions(pattern, **options), GrepOptions(pattern, prefilter=False, **options)
    except AgentError:
        return
    assert list(grep(files, fast)) == list(grep(files, slow))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), pattern=PATTERNS, ignore_case=st.booleans())
def test_every_match_holds_a_needle(data: st.DataObject, pattern: str, ignore_case: bool):
    compiled, needed = compile_pattern(pattern, ignore_case=ignore_case)
    if needed is not None:
        text = data.draw(st.from_regex(compiled, alphabet=st.characters(codec="utf-8")))
        assert needed.may_match(text.encode())


@pytest.mark.parametrize(
    ("pattern", "flags", "texts"),
    [
        (FOUR, 0, FOUR.split("|")),
        ("foo|fob|bar", 0, ["foo", "fob", "bar"]),
        ("a+(?:long_name|x)b", 0, ["a"]),
        ("(long_name)+", 0, ["long_name"]),
        ("(long_name)*", 0, None),
        ("(?:x|long_name)?y", 0, ["y"]),
        ("[ab]", 0, None),
        ("abc|", 0, None),
        ("(?i:abc)", 0, None),
        ("ABC", re.IGNORECASE, ["abc"]),
        ("é", re.IGNORECASE, None),
        (r"\babc$", 0, ["abc"]),
    ],
)
def test_needles(pattern: str, flags: int, texts: list[str] | None):
    found = needles(pattern, flags | re.UNICODE)
    if texts is None:
        assert found is None
    else:
        # The parser factors out what alternatives share; what stays needed is the same or weaker.
        assert found is not None
        for text in texts:
            assert any(needle in text.encode() for needle in found.texts)
        assert not found.may_match(b"zzz")


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab\n", max_size=60),
    before=st.none() | st.integers(0, 4),
    after=st.none() | st.integers(0, 4),
)
def test_context_is_what_a_plain_reading_gives(text: str, before: int | None, after: int | None):
    lines = text.split("\n")[:-1] if text.endswith("\n") or not text else text.split("\n")
    matching = [index for index, line in enumerate(lines) if "a" in line]
    shown = sorted(
        {
            near
            for index in matching
            for near in range(index - (before or 0), index + (after or 0) + 1)
            if 0 <= near < len(lines)
        }
    )
    want = []
    for at, index in enumerate(shown):
        if at and shown[at - 1] != index - 1 and (before is not None or after is not None):
            want.append("--")
        mark = ":" if index in matching else "-"
        want.append(f"f{mark}{index + 1}{mark}{lines[index]}")
    options = GrepOptions("a", before=before, after=after)
    assert [hit.render() for hit in grep([("f", text.encode())], options)] == want


@settings(max_examples=100, deadline=None)
@given(name=st.text(alphabet="ab[]*?!-^\\./", min_size=1, max_size=6))
def test_an_escaped_glob_matches_its_own_name(name: str):
    escaped = "".join(f"[{char}]" if char in "*?[" else char for char in name)
    if name.strip("/") and "//" not in name:
        tied = "" if name.startswith("/") else "x/"
        assert glob_pattern(escaped).match(tied + name.lstrip("/") + ("y" if name.endswith("/") else ""))


# The operations.


def _session(site: Path, python: str = sys.executable) -> HostSession:
    return HostSession(Target(name="box", kind="local", root=str(site), python=python), LocalTransport)


@pytest.fixture
def small_site(tmp_path: Path) -> Path:
    site = _tree(
        tmp_path,
        {
            "files": {
                "sglang/srt/a.py": "def target():\n    return 1\n",
                "sglang/srt/sub/b.py": "from sglang.srt.a import target\ntarget()\n",
                "sglang/srt/broken.py": "def target(:\n",
                "sglang/srt/built.so": "target\n",
                "sglang/srt/libx.so.1": "target\n",
                "sglang/srt/note.md": "target\n",
                "sglang/srt/.ddtree-temp": "target\n",
                "sglang/srt/__pycache__/a.cpython-311.pyc": "target\n",
                "sglang/lang/elsewhere.py": "target\n",
                "outside/x.py": "target\n",
            }
        },
    )
    (site / "sglang" / "srt" / "link.py").symlink_to("a.py")
    (site / "sglang" / "srt" / "away").symlink_to(site / "outside")
    os.mkfifo(site / "sglang" / "srt" / "pipe.py")
    return site


def test_grep_on_a_host(small_site: Path):
    summary: dict = {}
    with _session(small_site) as session:
        hits = list(grep_host(session, {"pattern": "target", "files_only": True}, Where(), summary))
    assert [hit.path for hit in hits] == [
        "sglang/srt/a.py",
        "sglang/srt/broken.py",
        "sglang/srt/note.md",
        "sglang/srt/sub/b.py",
    ]
    assert summary == {
        "site": str(small_site),
        "version": None,
        "searched": 4,
        "hits": 4,
        "matched": 4,
    }


def test_find_def_on_a_host(small_site: Path):
    summary: dict = {}
    with _session(small_site) as session:
        found = find_host(session, {"symbol": "target", "refs": True}, Where(), summary)
    assert [(item.kind, item.path, item.line) for item in found.definitions] == [
        ("function", "sglang/srt/a.py", 1),
        ("import", "sglang/srt/sub/b.py", 1),
        ("unparsed", "sglang/srt/broken.py", 1),
    ]
    assert [(item.path, item.line, item.label) for item in found.references] == [("sglang/srt/sub/b.py", 2, "name")]
    assert [item.path for item in found.unparsed] == ["sglang/srt/broken.py"]
    assert (summary["definitions"], summary["references"], summary["unparsed"]) == (3, 1, 1)


def test_under_names_a_folder_on_the_host(small_site: Path):
    with _session(small_site) as session:
        hits = list(grep_host(session, {"pattern": "target"}, Where(under="sub")))
        assert [hit.render() for hit in hits] == [
            "sglang/srt/sub/b.py:1:from sglang.srt.a import target",
            "sglang/srt/sub/b.py:2:target()",
        ]
        for under, code in (("lang", "DD008"), ("nowhere", "DD008"), ("away", "DD509")):
            with pytest.raises(DeployError) as caught:
                list(grep_host(session, {"pattern": "target"}, Where(under=under)))
            assert caught.value.code == code
        with pytest.raises(DeployError) as caught:
            list(grep_host(session, {"pattern": "("}, Where()))
        assert caught.value.code == "DD008"


def test_names_that_are_not_utf8(tmp_path: Path):
    folder = os.fsencode(_tree(tmp_path, {"files": {}})) + b"/sglang/srt"
    for name in (b"caf\xe9.py", b"caf\xc3\xa9.py", b"new\nline.py"):
        with open(folder + b"/" + name, "wb") as handle:
            handle.write(b"x = 1\n")
    with _session(tmp_path / "site") as session:
        hits = [hit.path for hit in grep_host(session, {"pattern": "x"}, Where())]
    assert [os.fsencode(path).rpartition(b"/")[2] for path in hits] == [
        b"caf\xc3\xa9.py",
        b"caf\xe9.py",
        b"new\nline.py",
    ]


# The published engine: answers that are known.


def _files(site: Path, under: str | None = None) -> list[tuple[str, bytes]]:
    found = []
    for node in walk(str(site), [under] if under else ["sglang/srt", "sglang/jit_kernel"]):
        if not is_built(node.path):
            found.append((node.path, read_file(node)[1]))
    return found


@pytest.mark.wheel
def test_the_four_patterns(wheel_site: Path):
    with _session(wheel_site) as session:
        hits = list(grep_host(session, {"pattern": FOUR}, Where(under="srt/speculative")))
    assert len(hits) == 25
    assert [hit.line for hit in hits if hit.path == "sglang/srt/speculative/eagle_worker.py"] == [893, 1034, 1055, 1057]
    assert [hit.line for hit in hits if hit.path == "sglang/srt/speculative/eagle_info.py"] == [156]


@pytest.mark.wheel
def test_the_known_definition(wheel_site: Path):
    with _session(wheel_site) as session:
        found = find_host(session, {"symbol": SYMBOL, "before": 20, "after": 0}, Where())
    npu = "sglang/srt/hardware_backend/npu/attention/ascend_hybrid_linear_attn_backend.py"
    backend = "sglang/srt/layers/attention/hybrid_linear_attn_backend.py"
    assert [(item.path, item.line, item.body_line) for item in found.definitions] == [
        (npu, 220, 200),
        (backend, 937, 917),
    ]
    assert found.definitions[1].name == f"HybridLinearAttnBackend.{SYMBOL}"
    assert found.definitions[1].body[-1].strip() == f"def {SYMBOL}("
    assert found.unparsed == []


@pytest.mark.wheel
def test_every_source_of_the_engine_is_found_by_its_classes(wheel_site: Path):
    """Each ``class`` line that a regular expression sees outside strings is a definition, and the other way round."""
    files = _files(wheel_site, "sglang/srt/speculative")
    by_line = {
        (path, number, match.group(1))
        for path, data in files
        for number, line in enumerate(data.decode().split("\n"), 1)
        if (match := re.match(r"\s*class (\w+)\s*[(:]", line))
    }
    names = {name for _path, _number, name in by_line}
    found = {
        (item.path, item.line, item.name.rpartition(".")[2])
        for name in names
        for item in find_def(files, FindOptions(name)).definitions
        if item.kind == "class"
    }
    assert found == by_line


GNU_PATTERNS = [
    FOUR,
    r"^class [A-Za-z_]+\(",
    "mamba",
    r"def forward_(extend|decode)\(",
    r"self\.[a-z_]+ = None$",
    "TODO|FIXME",
    "[0-9]{4,}",
    "é|—",
    r"x{2,3}|\[\]$",
]
GNU_FLAGS: list[tuple[list[str], dict]] = [
    ([], {}),
    (["-C2"], {"before": 2, "after": 2}),
    (["-A3"], {"after": 3}),
    (["-B1"], {"before": 1}),
    (["-A0"], {"after": 0}),
    (["-w"], {"word": True}),
    (["-i"], {"ignore_case": True}),
    (["-c"], {"count": True}),
    (["-l"], {"files_only": True}),
    (["-iw", "-C1"], {"ignore_case": True, "word": True, "before": 1, "after": 1}),
]


@pytest.mark.wheel
@pytest.mark.skipif(not shutil.which("grep"), reason="no grep on PATH")
@pytest.mark.parametrize(("under", "every"), [("sglang/srt/speculative", GNU_FLAGS), ("sglang/srt", GNU_FLAGS[:1])])
def test_agrees_with_gnu_grep(wheel_site: Path, under: str, every: list[tuple[list[str], dict]]):
    files = _files(wheel_site, under)
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    compared = 0
    for pattern in GNU_PATTERNS:
        for flags, options in every:
            command = ["grep", "-HnE", *flags, "-e", pattern, "--", *(path for path, _data in files)]
            done = subprocess.run(command, cwd=wheel_site, env=environment, capture_output=True, check=False)
            want = done.stdout.decode("utf-8", "surrogateescape").split("\n")[:-1]
            if flags == ["-c"]:
                want = [line for line in want if not line.endswith(":0")]
            assert [hit.render() for hit in grep(files, GrepOptions(pattern, **options))] == want, (pattern, flags)
            compared += len(want)
    assert compared > 1000
