"""Replies that lie: whatever a host answers, a command ends in a clear error or in what the reply can prove.

Honest replies are recorded from a real agent, then one place of one of them is changed.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_deploy.agent import protocol
from ddtree_deploy.agent.protocol import MessageReader, MessageWriter
from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts import connect as connect_module
from ddtree_deploy.hosts.local import LocalTransport
from ddtree_deploy.hosts.replies import check_reply
from tests.cli.harness import ONE, Cli

ODD = [
    None,
    True,
    -1,
    2**70,
    10**400,
    0.5,
    float("nan"),
    "",
    "x",
    "../x",
    "sglang/../x",
    "/etc/passwd",
    [],
    [None],
    ["x", "x"],
    {},
    {"x": 1},
]


class Recording:
    """The agent's side of every exec, as it came: one list of (frame type, payload) each."""

    def __init__(self) -> None:
        self.messages: list[list[tuple[bytes, bytes]]] = []

    user = "ops"

    def start(self, argv):
        process = LocalTransport().start(argv)
        said: list[bytes] = []
        read, kill = process.read, process.kill

        def reading(size: int) -> bytes:
            said.append(read(size))
            return said[-1]

        def killed() -> None:
            data = b"".join(said).partition(b"\n")[2]
            if data:
                rest = iter([data])
                stream = _Stream(next(rest))
                self.messages.append(list(MessageReader(stream.read).frames()))
            said.clear()
            kill()

        process.read, process.kill = reading, killed
        return process

    def close(self) -> None:
        pass


class _Stream:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, size: int) -> bytes:
        piece, self._data = self._data[:size], self._data[size:]
        return piece


class Replaying:
    """A host that answers the execs with these messages, in turn, whatever it is asked."""

    user = "ops"

    def __init__(self, messages) -> None:
        self._messages: Iterator = iter(messages)

    def start(self, _argv):
        return _Process(next(self._messages, []))

    def close(self) -> None:
        pass


class _Process:
    def __init__(self, message) -> None:
        self._message = message
        self._sent = b""
        self._stream: _Stream | None = None

    def write(self, data: bytes) -> None:
        self._sent += data

    def close_stdin(self) -> None:
        pass

    def read(self, size: int) -> bytes:
        if self._stream is None:
            length, _, rest = self._sent.partition(b"\n")
            source = zlib.decompress(rest[: int(length)]).decode()
            said = [protocol.MAGIC + re.search("NONCE = '(.*?)'", source)[1].encode() + b"\n"]
            writer = MessageWriter(said.append)
            for kind, payload in self._message:
                if kind == protocol.BLOB:
                    writer.data(payload)
                else:
                    writer.frame(kind, payload)
            writer.end()
            self._stream = _Stream(b"".join(said))
        return self._stream.read(size)

    def stderr(self) -> str:
        return ""

    def wait(self) -> int:
        return 0

    def kill(self) -> None:
        pass


class Liar:
    """A user whose host's replies can be changed."""

    def __init__(self, cli: Cli, monkeypatch, where: Sequence[str] = ()) -> None:
        self.cli = cli
        self._patch = monkeypatch
        (cli.folder / "patches").mkdir()
        monkeypatch.setenv("DDTREE_DEPLOY_PATCHES", str(cli.folder / "patches"))
        here = ["--host", f"local:{cli.site}", "--python", sys.executable, "--state-dir", str(cli.state)]
        self.where = where or here

    def _run(self, transport, *arguments: str):
        self._patch.setattr(connect_module, "connect", lambda _target, **_options: transport)
        return self.cli.run(*arguments, *self.where)

    def record(self, *arguments: str):
        recording = Recording()
        result = self._run(recording, *arguments)
        assert result.status in (0, 1), result.err
        assert recording.messages
        return recording.messages

    def replay(self, messages, *arguments: str):
        return self._run(Replaying(messages), *arguments)


@pytest.fixture(scope="module")
def liar(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield Liar(Cli(tmp_path_factory.mktemp("user"), patch), patch)


@pytest.fixture(scope="module")
def recorded(liar):
    """Command line -> the replies that it got."""
    patch = liar.cli.patch("one.patch", ONE)
    commands = (
        ("apply", patch, "--check"),
        ("apply", patch),
        ("status", "--files"),
        ("history",),
        ("recover",),
        ("rollback", "one"),
    )
    return {command: liar.record(*command) for command in commands}


def places(value, path=()) -> Iterator[tuple]:
    """Every place in a JSON value, as the keys that lead there."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value, path, replacement):
    """The value with another thing, or with nothing, at a place."""
    value = copy.deepcopy(value)
    at = value
    for key in path[:-1]:
        at = at[key]
    if replacement is _GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = replacement
    return value


_GONE = object()


def tell_a_lie(data, frames) -> tuple:
    """Change one drawn place in one of an answer's frames; returns the place."""
    at = data.draw(st.sampled_from([at for at, (kind, _payload) in enumerate(frames) if kind in (b"Q", b"J", b"P")]))
    value = json.loads(frames[at][1])
    path = data.draw(st.sampled_from(sorted(places(value), key=str)))
    lie = changed(value, path, data.draw(st.sampled_from([_GONE, *ODD])))
    frames[at] = (frames[at][0], json.dumps(lie).encode("ascii"))
    return path


def test_honest_replies_are_believed(liar, recorded):
    for command, messages in recorded.items():
        assert liar.replay(messages, *command).status == 0, command


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_one_changed_place_never_breaks_the_command(liar, recorded, data):
    command = data.draw(st.sampled_from(list(recorded)))
    messages = [list(message) for message in recorded[command]]
    path = tell_a_lie(data, messages[data.draw(st.integers(0, len(messages) - 1))])
    for extra in ([], ["--json"]):
        result = liar.replay(messages, *command, *extra)
        assert result.status != 8, (command, path, result.err)
        if extra:
            json.loads(result.out)
    if command[0] in ("apply", "rollback") and "--check" not in command and result.status == 0:
        # It only says that it is done where the files were read back as they had to be.
        (result_frame,) = [json.loads(payload) for kind, payload in messages[-1] if kind == b"Q"]
        honest = json.loads(recorded[command][-1][-1][1])
        assert result_frame["files"] == honest["files"] or command[0] == "rollback"


@pytest.mark.parametrize(
    ("where", "lie", "words"),
    [
        (("entries", "sglang/srt/a.py"), {"kind": "file", "sha256": "0" * 63, "size": 1, "mode": 0}, "sha256"),
        (("entries", "sglang/srt/a.py"), {"kind": "file", "sha256": "0" * 64, "size": -1, "mode": 0}, "-1 bytes"),
        (("entries", "../etc/passwd"), None, "not a clean relative path"),
        (("entries", "sglang/srt/../../x"), None, "not a clean relative path"),
        (("record", "differs"), ["sglang/srt/a.py", "sglang/srt/a.py"], "a path twice"),
        (("record", "missing"), ["/etc/passwd"], "not a clean relative path"),
        (("layers",), [], None),
        (("entries",), {}, "says nothing of sglang/srt/a.py"),
        (("layers",), ["x"], "a layer"),
        (("root", "version"), 5, "root: version: '5' is not str"),
        (("processes",), [{"pid": "1"}], "processes: 0: pid"),
        (("last", "time"), "2026-13-41T25:61:61Z", "last: .* does not match"),
        (("last", "time"), "2026-01-01T00:00:00Z\n", "last: .* is no moment"),
        (("entries", "sglang/srt/a.py\n"), None, "control characters"),
        (("entries", "sglang/srt/a.py", "sha256"), "0" * 64 + "\n", "bad sha256"),
    ],
)
def test_what_is_said_of_a_lie(recorded, where, lie, words):
    frames = recorded["status", "--files"][0]
    honest = json.loads(frames[-1][1])
    check_reply("box", "status", {}, honest)
    value = changed(honest, where, lie)
    if words is None:
        check_reply("box", "status", {}, value)
        return
    with pytest.raises(DeployError, match=words) as caught:
        check_reply("box", "status", {}, value)
    assert (caught.value.code, caught.value.exit_status) == ("DD307", 4)


def test_a_set_twice_in_the_record(recorded):
    frames = recorded["status", "--files"][0]
    honest = json.loads(frames[-1][1])
    assert honest["layers"]
    with pytest.raises(DeployError, match="a set twice"):
        check_reply("box", "status", {}, {**honest, "layers": honest["layers"] * 2})


def test_after_a_change_the_error_says_that_it_may_have_been_made(recorded):
    with pytest.raises(DeployError) as caught:
        check_reply("box", "apply", {}, {"files": 1})
    assert "may have been made" in str(caught.value.hint)
