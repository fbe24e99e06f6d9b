"""The walk and the snapshot operation, called in this process on trees made for each test."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.agent import manifest, tree, walk
from ddtree_deploy.agent.call import Call
from ddtree_deploy.agent.protocol import AgentError, MessageReader, MessageWriter, decode
from ddtree_deploy.agent.walk import Node, Reading, hash_file, read_file

FILES = {
    "sglang/srt/__init__.py": b"",
    "sglang/srt/a.py": b"A = 1\n",
    "sglang/srt/a/b.py": b"B = 1\n",
    "sglang/srt/a-b.py": b"AB = 1\n",
    "sglang/srt/built.so": b"\x7fELF\0",
    "sglang/jit_kernel/k.cu": b"kernel\n",
    "sglang/lang/not_in_scope.py": b"x\n",
}


def make(site: Path, files: dict[str, bytes] = FILES) -> Path:
    for path, data in files.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return site


def record(site: Path, files: dict[str, bytes] = FILES, extra: str = "") -> Path:
    info = site / "sglang-0.5.11.dist-info"
    info.mkdir(exist_ok=True)
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for path, data in files.items()
    ]
    (info / "RECORD").write_text("\n".join(rows) + "\nsglang-0.5.11.dist-info/RECORD,,\n" + extra)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.11\n\n")
    return info


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make(tmp_path / "site-packages")


class Conversation(Call):
    """One snapshot call: what the agent sent, and what the client answers at its turn."""

    def __init__(self, site: Path, answer: Callable[[list[dict]], dict] | None = None, **request: object) -> None:
        self.sent: list[bytes] = []
        self._answer = answer
        super().__init__({"root": str(site), **request}, None, MessageWriter(self.sent.append))  # type: ignore[arg-type]

    def turn(self) -> dict:
        self._tell(self._writer.end)
        self.before = self.message_parts()
        self.sent.clear()
        assert self._answer is not None
        return self._answer([json.loads(line) for line in self.before[1].splitlines()])

    def message_parts(self) -> tuple[list[dict], bytes]:
        """(messages, data) of the message sent so far."""
        stream = memoryview(b"".join(self.sent))
        at = 0

        def read(size: int) -> bytes:
            nonlocal at
            at += size
            return bytes(stream[at - size : at])

        frames = list(MessageReader(read).frames())
        return [decode(payload) for kind, payload in frames if kind != b"B"], b"".join(
            payload for kind, payload in frames if kind == b"B"
        )

    def run(self) -> tuple[dict, bytes]:
        """(result, data of the last message)."""
        result = manifest.run_snapshot(self)
        self._tell(self._writer.end)
        return result, self.message_parts()[1]


def entries_of(site: Path, **request: object) -> dict[str, dict]:
    """The manifest, as a client would see it."""
    seen: list[dict] = []

    def answer(entries: list[dict]) -> dict:
        seen.extend(entries)
        return {"want": []}

    Conversation(site, answer, **request).run()
    return {entry["path"]: entry for entry in seen}


def facts_of(site: Path) -> dict:
    return Conversation(site, stream=True).run()[0]["facts"]


# The walk.


def paths(site: Path, *starts: str) -> list[str]:
    return [node.path for node in walk.walk(str(site), starts or ("sglang/srt", "sglang/jit_kernel"))]


def test_order_is_that_of_the_path_bytes(site: Path):
    found = paths(site)
    assert found == [
        "sglang/jit_kernel/k.cu",
        "sglang/srt/__init__.py",
        "sglang/srt/a-b.py",
        "sglang/srt/a.py",
        "sglang/srt/a/b.py",
        "sglang/srt/built.so",
    ]


NAMES = st.text(alphabet="aA.-0_é~ ", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))


@settings(max_examples=60, deadline=None)
@given(st.sets(st.lists(NAMES, min_size=1, max_size=3).map("/".join), max_size=12))
def test_any_tree_is_walked_in_order(names: set[str]):
    with tempfile.TemporaryDirectory() as temporary:
        _walked_in_order(Path(temporary), names)


def _walked_in_order(top: Path, names: set[str]) -> None:
    (top / "sglang/srt").mkdir(parents=True)
    made = set()
    for name in sorted(names):
        target = top / "sglang/srt" / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch(exist_ok=False)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue
        made.add(f"sglang/srt/{name}")
    assert paths(top, "sglang/srt") == sorted(made, key=os.fsencode)


def test_what_is_left_out(site: Path):
    make(
        site,
        {
            "sglang/srt/__pycache__/a.cpython-312.pyc": b"x",
            "sglang/srt/old.pyc": b"x",
            "sglang/srt/.ddtree-1-a.py": b"x",
            "sglang/srt/.hidden": b"x",
        },
    )
    extra = set(paths(site)) - set(FILES)
    assert extra == {"sglang/srt/.hidden"}
    assert walk.TEMP_PREFIX == tree.TEMP_PREFIX


def test_links_and_odd_files_are_listed_and_not_followed(site: Path):
    srt = site / "sglang/srt"
    (srt / "to_file.py").symlink_to("a.py")
    (srt / "to_folder").symlink_to("/etc")
    (srt / "dangling").symlink_to("nowhere/é")
    os.mkfifo(srt / "pipe.py")
    found = entries_of(site)
    assert found["sglang/srt/to_file.py"] == {"path": "sglang/srt/to_file.py", "kind": "link", "target": "a.py"}
    assert found["sglang/srt/to_folder"]["target"] == "/etc"
    assert found["sglang/srt/dangling"]["target"] == "nowhere/é"
    assert found["sglang/srt/pipe.py"] == {"path": "sglang/srt/pipe.py", "kind": "other"}
    assert not any(path.startswith("sglang/srt/to_folder/") for path in found)


def test_a_linked_engine_folder_is_refused(site: Path, tmp_path: Path):
    (site / "sglang/jit_kernel").rename(tmp_path / "elsewhere")
    (site / "sglang/jit_kernel").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AgentError) as caught:
        entries_of(site)
    assert caught.value.code == "DD509"
    assert "sglang/jit_kernel" in caught.value.message


def test_a_single_file_is_a_start_too(site: Path):
    assert paths(site, "sglang/srt/a/b.py") == ["sglang/srt/a/b.py"]
    assert paths(site, "sglang/srt/absent.py") == []


def test_what_vanishes_meanwhile_was_never_there(site: Path):
    steps = walk.walk(str(site), ["sglang/srt"])
    assert next(steps).path == "sglang/srt/__init__.py"
    shutil.rmtree(site / "sglang/srt/a")
    assert [node.path for node in steps] == ["sglang/srt/a-b.py", "sglang/srt/a.py", "sglang/srt/built.so"]


def test_a_file_that_vanishes_before_it_is_read(site: Path, monkeypatch: pytest.MonkeyPatch):
    real = walk.read_file

    def vanish(node: Node, limit: int | None = None):
        if node.path == "sglang/srt/a.py":
            (site / node.path).unlink()
        return real(node, limit)

    monkeypatch.setattr(manifest, "read_file", vanish)
    found = entries_of(site)
    assert "sglang/srt/a.py" not in found
    assert "sglang/srt/a-b.py" in found


def test_a_folder_that_turns_into_a_link(site: Path):
    steps = walk.walk(str(site), ["sglang/srt"])
    next(steps)
    shutil.rmtree(site / "sglang/srt/a")
    (site / "sglang/srt/a").symlink_to("/etc")
    with pytest.raises(AgentError) as caught:
        list(steps)
    assert caught.value.code == "DD403"


def test_a_file_that_turns_into_a_link_is_not_read(site: Path):
    for node in walk.walk(str(site), ["sglang/srt/a.py"]):
        (site / "sglang/srt/a.py").unlink()
        (site / "sglang/srt/a.py").symlink_to("/etc/passwd")
        with pytest.raises(AgentError) as caught:
            read_file(node)
    assert caught.value.code == "DD403"


def test_too_deep(site: Path):
    make(site, {"sglang/srt/" + "d/" * 70 + "x.py": b""})
    with pytest.raises(AgentError, match="nested more than"):
        paths(site)


@pytest.mark.parametrize("name", ["a.py", "a"])
def test_what_cannot_be_read_is_named(site: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    real = os.open

    def refuse(path, flags, mode=0o777, *, dir_fd=None):
        if path == name:
            raise PermissionError(errno.EACCES, "denied", path)
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(walk.os, "open", refuse)
    with pytest.raises(AgentError) as caught:
        entries_of(site)
    assert caught.value.code == "DD406"
    assert caught.value.message == f"sglang/srt/{name} cannot be read: Permission denied"


def test_no_descriptor_is_left_open(site: Path):
    before = os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else None
    steps = walk.walk(str(site), ["sglang/srt"])
    next(steps)
    steps.close()
    Conversation(site, stream=True).run()
    with pytest.raises(AgentError):
        list(walk.walk(str(site), ["sglang/srt/a.py/x"]))
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == len(before)


# Reading while somebody writes.


def _writer_during(monkeypatch: pytest.MonkeyPatch, target: Path, times: int) -> None:
    real, left = Reading.read, [times]

    def read(self: Reading, size: int) -> bytes:
        data = real(self, size)
        if left[0] and data:
            left[0] -= 1
            with target.open("ab") as handle:
                handle.write(b"more\n")
            os.utime(target, ns=(0, left[0] + 1))
        return data

    monkeypatch.setattr(Reading, "read", read)


@pytest.mark.parametrize("reader", [read_file, hash_file])
def test_a_file_that_changes_once_is_read_again(site: Path, monkeypatch: pytest.MonkeyPatch, reader):
    _writer_during(monkeypatch, site / "sglang/srt/a.py", 1)
    node = _node(site, "sglang/srt/a.py")
    _info, found = reader(node)
    assert found in (b"A = 1\nmore\n", hashlib.sha256(b"A = 1\nmore\n").digest())
    os.close(node.folder)


@pytest.mark.parametrize("reader", [read_file, hash_file])
def test_a_file_that_keeps_changing_is_an_error(site: Path, monkeypatch: pytest.MonkeyPatch, reader):
    _writer_during(monkeypatch, site / "sglang/srt/a.py", 1_000_000)
    node = _node(site, "sglang/srt/a.py")
    with pytest.raises(AgentError) as caught:
        reader(node)
    assert caught.value.code == "DD403"
    os.close(node.folder)


def _node(site: Path, path: str) -> Node:
    folder, _, name = path.rpartition("/")
    return Node(path, "file", walk.open_folder(str(site), folder), name)


# Entries.


def test_entries_say_what_the_files_are(site: Path):
    (site / "sglang/srt/a.py").chmod(0o750)
    os.link(site / "sglang/srt/a.py", site / "linked")
    found = entries_of(site)
    assert found["sglang/srt/a.py"] == {
        "path": "sglang/srt/a.py",
        "kind": "file",
        "mode": 0o750,
        "size": 6,
        "sha256": hashlib.sha256(b"A = 1\n").hexdigest(),
        "nlink": 2,
        "content": True,
        "record": None,
    }
    assert found["sglang/srt/built.so"]["content"] is False
    assert found["sglang/srt/built.so"]["sha256"] == hashlib.sha256(b"\x7fELF\0").hexdigest()


def test_large_files_stay_on_the_host(site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifest, "MAX_TEXT", 6)
    found = entries_of(site)
    assert found["sglang/srt/a.py"]["content"] is True
    assert found["sglang/srt/a-b.py"]["content"] is False
    assert found["sglang/srt/a-b.py"]["sha256"] == hashlib.sha256(b"AB = 1\n").hexdigest()


@pytest.mark.parametrize(
    ("name", "built"),
    [("x.so", True), ("libx.so.1.2", True), ("x.a", True), ("x.py", False), ("soft.so_x.py", False), ("x.json", False)],
)
def test_built(name: str, built: bool):
    assert walk.is_built("some.so.d/" + name) is built


# RECORD.


def test_record_verdicts(site: Path):
    record(
        site,
        extra="sglang/srt/gone.py,sha256=AAAA,3\n"
        "sglang\\srt\\windows.py,sha256=AAAA,3\n"
        "sglang/srt/__pycache__/gone.pyc,,\n"
        "../../../bin/sglang,sha256=AAAA,3\n"
        "sglang/srt/unhashed.py,,\n"
        "sglang/srt/other.py,sha512=AAAA,2\n",
    )
    make(
        site,
        {
            "sglang/srt/a.py": b"edited\n",
            "sglang/srt/new.py": b"",
            "sglang/srt/unhashed.py": b"",
            "sglang/srt/other.py": b"",
        },
    )
    found = entries_of(site)
    assert {path: entry["record"] for path, entry in found.items()} == {
        "sglang/jit_kernel/k.cu": "ok",
        "sglang/srt/__init__.py": "ok",
        "sglang/srt/a-b.py": "ok",
        "sglang/srt/a.py": "differs",
        "sglang/srt/a/b.py": "ok",
        "sglang/srt/built.so": "ok",
        "sglang/srt/new.py": "unlisted",
        "sglang/srt/other.py": "unhashed",
        "sglang/srt/unhashed.py": "unhashed",
    }
    assert facts_of(site)["record"] == {
        "state": "present",
        "problem": None,
        "counts": {"ok": 5, "differs": 1, "unlisted": 1, "unhashed": 2},
        "missing": ["sglang/srt/gone.py", "sglang/srt/windows.py"],
    }


def test_no_record(site: Path):
    assert facts_of(site)["record"] == {"state": "absent", "problem": None, "counts": {}, "missing": []}
    (record(site) / "RECORD").unlink()
    assert facts_of(site)["record"]["state"] == "absent"


@pytest.mark.parametrize("text", ["sglang/srt/a.py\n", 'sglang/srt/"a.py\n', "a,b,c,d\n"])
def test_a_damaged_record_is_said_to_be_damaged(site: Path, text: str):
    (record(site) / "RECORD").write_text(text)
    facts = facts_of(site)["record"]
    assert facts["state"] == "damaged"
    assert facts["problem"]
    assert all(entry["record"] is None for entry in entries_of(site).values())


# The operation.


def test_stream_is_lines_and_contents(site: Path):
    result, data = Conversation(site, stream=True).run()
    seen = {}
    while data:
        line, _, data = data.partition(b"\n")
        entry = json.loads(line)
        if entry["content"]:
            seen[entry["path"]], data = data[: entry["size"]], data[entry["size"] :]
    assert seen == {path: FILES[path] for path in FILES if path != "sglang/srt/built.so" and "/lang/" not in path}
    assert (result["answer"], result["count"]) == ("stream", 6)


def test_same_is_said_and_nothing_else(site: Path):
    state = Conversation(site, stream=True).run()[0]["state"]
    result, data = Conversation(site, have=state).run()
    assert (result, data) == ({"answer": "same", "state": state}, b"")


def _mode(site: Path) -> None:
    (site / "sglang/srt/a.py").chmod(0o600)


def _content(site: Path) -> None:
    # The same size, and the same time: nothing but the bytes tells.
    target = site / "sglang/srt/a.py"
    info = target.stat()
    target.write_bytes(b"A = 2\n")
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def _link(site: Path) -> None:
    (site / "sglang/srt/l").symlink_to("a.py")


def _retarget(site: Path) -> None:
    (site / "sglang/srt/l").unlink()
    (site / "sglang/srt/l").symlink_to("a/b.py")


def _rename(site: Path) -> None:
    (site / "sglang/srt/a.py").rename(site / "sglang/srt/c.py")


def test_every_change_changes_both_digests(site: Path):
    seen_trees, seen_states = set(), set()
    for number, change in enumerate((lambda _site: None, _mode, _content, _link, _retarget, _rename)):
        change(site)
        result = Conversation(site, stream=True).run()[0]
        seen_trees.add(result["tree"])
        seen_states.add(result["state"])
        assert (len(seen_trees), len(seen_states)) == (number + 1, number + 1)


def test_equal_trees_have_equal_tree_digests_whatever_else_is_known(site: Path, tmp_path: Path):
    one = Conversation(site, stream=True).run()[0]
    other = make(tmp_path / "other")
    record(other)
    os.link(other / "sglang/srt/a.py", tmp_path / "linked")
    two = Conversation(other, stream=True).run()[0]
    assert one["tree"] == two["tree"]
    assert one["state"] != two["state"]


def test_only_what_is_wanted_is_sent(site: Path):
    def answer(entries: list[dict]) -> dict:
        paths = [entry["path"] for entry in entries]
        return {"want": [paths.index("sglang/srt/a/b.py"), paths.index("sglang/srt/a.py")]}

    conversation = Conversation(site, answer, have="something else")
    result, data = conversation.run()
    assert conversation.before[0][0]["answer"] == "manifest"
    assert data == b"B = 1\nA = 1\n"
    assert result == {"answer": "contents", "files": 2}


def test_binaries_are_sent_when_asked_for(site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifest, "MAX_TEXT", 6)

    def answer(entries: list[dict]) -> dict:
        return {"want": [index for index, entry in enumerate(entries) if entry["content"]]}

    conversation = Conversation(site, answer, stream=True, binaries=True)
    _result, data = conversation.run()
    assert data == b"kernel\n" + b"AB = 1\n" + b"A = 1\n" + b"B = 1\n" + b"\x7fELF\0"


@pytest.mark.parametrize("want", [[99], [-1], ["0"], [None], [5], "all", None])
def test_what_is_not_offered_cannot_be_had(site: Path, want: object):
    with pytest.raises(AgentError) as caught:
        Conversation(site, lambda _entries: {"want": want}).run()
    assert caught.value.code == "DD307"


def _gone(target: Path) -> None:
    target.unlink()


def _edited(target: Path) -> None:
    target.write_bytes(b"A = 2\n")


def _grown(target: Path) -> None:
    target.write_bytes(b"A" * 100)


def _linked(target: Path) -> None:
    target.unlink()
    target.symlink_to("a-b.py")


def _folder_gone(target: Path) -> None:
    shutil.rmtree(target.parent)


@pytest.mark.parametrize("happens", [_gone, _edited, _grown, _linked, _folder_gone])
@pytest.mark.parametrize("limit", [6, 5])
def test_a_change_between_manifest_and_contents(
    site: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Path], None], limit: int
):
    # With the lower limit the file counts as large, and is sent in pieces.
    monkeypatch.setattr(manifest, "MAX_TEXT", limit)

    def answer(entries: list[dict]) -> dict:
        happens(site / "sglang/srt/a.py")
        return {"want": [[entry["path"] for entry in entries].index("sglang/srt/a.py")]}

    with pytest.raises(AgentError) as caught:
        Conversation(site, answer, binaries=True).run()
    assert caught.value.code == "DD403"
    assert "sglang/srt/a.py" in caught.value.message


def test_a_change_that_is_undone_meanwhile_is_no_error(site: Path, monkeypatch: pytest.MonkeyPatch):
    def answer(entries: list[dict]) -> dict:
        (site / "sglang/srt/a.py").write_bytes(b"other\n")
        return {"want": [[entry["path"] for entry in entries].index("sglang/srt/a.py")]}

    monkeypatch.setattr(manifest.time, "sleep", lambda _seconds: (site / "sglang/srt/a.py").write_bytes(b"A = 1\n"))
    assert Conversation(site, answer).run()[1] == b"A = 1\n"


def test_names_that_are_not_utf8_travel(site: Path):
    raw = os.fsencode(site) + b"/sglang/srt/caf\xe9.py"
    with open(raw, "wb") as handle:
        handle.write(b"x")
    os.symlink(b"caf\xe9.py", os.fsencode(site) + b"/sglang/srt/l")
    found = entries_of(site)
    assert found["sglang/srt/caf\udce9.py"]["size"] == 1
    assert found["sglang/srt/l"]["target"] == "caf\udce9.py"
    assert manifest.entry_line(found["sglang/srt/l"]).isascii()


def test_progress_is_told_now_and_then(site: Path, monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(manifest.time, "monotonic", lambda: next(clock))
    record(site)
    conversation = Conversation(site, stream=True)
    manifest.run_snapshot(conversation)
    conversation._tell(conversation._writer.end)
    told = [message for message in conversation.message_parts()[0] if "done" in message]
    assert [(message["done"], message["total"]) for message in told] == [(number, 6) for number in range(1, 7)]


def test_a_client_that_went_away_ends_the_work(site: Path):
    conversation = Conversation(site, stream=True)

    def broken(_data: bytes) -> None:
        raise BrokenPipeError

    conversation._writer = MessageWriter(broken)
    make(site, {f"sglang/srt/f{number}.py": os.urandom(200_000) for number in range(20)})
    result = manifest.run_snapshot(conversation)
    assert conversation.deaf
    assert result["count"] < 20


def test_modes_are_permission_bits_alone(site: Path):
    target = site / "sglang/srt/a.py"
    target.chmod(0o4755)
    assert stat.S_ISREG(target.stat().st_mode)
    assert entries_of(site)["sglang/srt/a.py"]["mode"] == 0o4755
