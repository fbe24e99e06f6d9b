"""Asking an index, over a real connection: good answers, hostile ones, and where a password goes."""

from __future__ import annotations

import base64
import http.server
import json
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.snapshots import index as module
from ddtree_deploy.snapshots.index import configured_index, published_wheels
from ddtree_deploy.snapshots.pins import Pin

BAD = tomllib.loads((Path(__file__).parents[1] / "cases/index/bad.toml").read_text())
GOOD = {
    "meta": {"api-version": "1.1"},
    "files": [
        {"filename": f"sglang-9.9.9-{tags}.whl", "hashes": {"sha256": str(number) * 64}, "size": 10 + number}
        for number, tags in enumerate(("cp312-cp312-manylinux_2_34_x86_64", "cp311-cp311-manylinux_2_34_x86_64"), 1)
    ]
    + [{"filename": "sglang-9.9.9.post1-py3-none-any.whl", "hashes": {"sha256": "9" * 64}, "size": 1}],
}


class Index:
    """A server on loopback that gives one reply; ``seen`` are the requests' (path, headers)."""

    def __init__(self) -> None:
        self.body, self.status, self.length = b"", 200, None
        self.location: str | None = None
        self.seen: list[tuple[str, dict[str, str]]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.seen.append((self.path, dict(self.headers)))
                self.send_response(outer.status)
                if outer.location:
                    self.send_header("Location", outer.location)
                self.send_header("Content-Length", str(len(outer.body) if outer.length is None else outer.length))
                self.end_headers()
                self.wfile.write(outer.body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    started = Index()
    yield started
    started.close()


def test_the_wheels_of_one_release(index: Index):
    index.body = json.dumps(GOOD).encode()
    assert published_wheels("9.9.9", index.url + "/") == (
        Pin("9.9.9", "cp311-cp311-manylinux_2_34_x86_64", "2" * 64, 12),
        Pin("9.9.9", "cp312-cp312-manylinux_2_34_x86_64", "1" * 64, 11),
    )
    ((path, headers),) = index.seen
    assert path == "/simple/sglang/"
    assert headers["Accept"] == "application/vnd.pypi.simple.v1+json"
    assert "Authorization" not in headers


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_bad_reply(index: Index, case):
    index.body, index.status, index.length = case["body"].encode(), case.get("status", 200), case.get("length")
    with pytest.raises(DeployError) as caught:
        published_wheels("9.9.9", index.url)
    assert caught.value.code == case["code"]
    assert case["part"] in caught.value.message
    assert case.get("hint", "") in (caught.value.hint or "")


def test_a_reply_without_end(index: Index, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_REPLY", 100)
    index.body = json.dumps(GOOD).encode()
    with pytest.raises(DeployError, match="too large"):
        published_wheels("9.9.9", index.url)


def test_a_password_goes_to_its_index_alone(index: Index):
    other = Index()
    try:
        other.body = json.dumps(GOOD).encode()
        index.status, index.location = 302, f"{other.url}/sglang/".replace("127.0.0.1", "localhost")
        secret = index.url.replace("//", "//me:s%40cret@")
        assert len(published_wheels("9.9.9", secret)) == 2
        ((_, first),), ((_, second),) = index.seen, other.seen
        assert first["Authorization"] == "Basic " + base64.b64encode(b"me:s@cret").decode()
        assert "Authorization" not in second
    finally:
        other.close()


def test_a_password_is_in_no_message(index: Index):
    index.status = 500
    with pytest.raises(DeployError) as caught:
        published_wheels("9.9.9", index.url.replace("//", "//me:secret@"))
    assert "secret" not in caught.value.message + str(caught.value.hint)
    with pytest.raises(DeployError) as caught:
        published_wheels("9.9.9", "file://me:secret@/etc/passwd")
    assert caught.value.code == "DD001"
    assert "secret" not in caught.value.message


def test_nobody_there():
    with pytest.raises(DeployError) as caught:
        published_wheels("9.9.9", "http://127.0.0.1:1/simple")
    assert caught.value.code == "DD404"


@pytest.mark.parametrize(
    ("said", "url"),
    [
        ("", module.PYPI),
        ("global.index-url='https://a/simple'\n", "https://a/simple"),
        (":env:.index-url='https://e/simple'\nglobal.index-url='https://a/simple'\n", "https://e/simple"),
        ("user.index-url='https://u/simple'\nglobal.index-url='https://a/simple'\n", "https://u/simple"),
        ("global.extra-index-url='https://x/simple'\n", module.PYPI),
    ],
)
def test_the_index_that_pip_uses(monkeypatch: pytest.MonkeyPatch, said: str, url: str):
    monkeypatch.setattr(
        module.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, said, "")
    )
    assert configured_index() == url
