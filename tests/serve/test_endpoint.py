"""What is asked of an engine, and how little of its answers is believed or passed on."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_deploy.agent.endpoint import Endpoint, Secrets, prove
from ddtree_deploy.serve.verdict import judge

SERVICE = {"model": "m", "algorithm": "DDTREE", "metrics": True, "verify_tokens": 16}


class Engine:
    """Answers by path: (status, body); anything else is 404."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[tuple[str, str | None]] = []
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                engine.asked.append((self.path, self.headers.get("Authorization")))
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, body = engine.answers.get(self.path, (404, b""))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_words):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = Endpoint("0.0.0.0", self.server.server_address[1], "the-key")
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    one = Engine()
    yield one
    one.server.shutdown()
    one.server.server_close()


def sound() -> dict[str, tuple[int, bytes]]:
    info = {
        "api_key": "never",
        "admin_api_key": "never",
        "speculative_algorithm": "DDTREE",
        "internal_states": [{"avg_spec_accept_length": 4.0}],
    }
    completion = {"choices": [{"text": " thirteen"}], "usage": {"completion_tokens": 3}}
    return {
        "/v1/completions": (200, json.dumps(completion).encode()),
        "/generate": (200, b'{"meta_info": {"spec_accept_length": 4.5}}'),
        "/server_info": (200, json.dumps(info).encode()),
        "/metrics": (200, b'# HELP x\nsglang:spec_accept_length{a="b c"} 3.5\nsglang:spec_accept_length{a="d"} 3.75\n'),
    }


def test_all_in_order(engine):
    engine.answers, engine.asked = sound(), []
    proof = prove(engine.endpoint, SERVICE)
    assert proof["accept_length"] == {"request": 4.5, "server": 4.0, "metrics": 3.75}
    assert proof["completion"] == {"text": " thirteen", "tokens": 3}
    assert proof["server"] == {"speculative_algorithm": "DDTREE"}
    assert "never" not in json.dumps(proof)
    assert {key for _path, key in engine.asked} == {"Bearer the-key"}
    assert judge(SERVICE, proof).findings == ()


def test_the_old_name_of_server_info(engine):
    engine.answers = sound()
    engine.answers["/get_server_info"] = engine.answers.pop("/server_info")
    assert prove(engine.endpoint, SERVICE)["server"] == {"speculative_algorithm": "DDTREE"}


def test_without_speculation_nothing_of_it_is_asked(engine):
    engine.answers, engine.asked = sound(), []
    prove(engine.endpoint, {**SERVICE, "algorithm": "none", "metrics": False})
    assert [path for path, _key in engine.asked] == ["/v1/completions", "/server_info"]


def test_nobody_there():
    endpoint = Endpoint("127.0.0.1", 1)
    assert not endpoint.is_taken()
    proof = prove(endpoint, SERVICE)
    assert proof["completion"] is None
    assert len(proof["problems"]) == 3
    assert not judge(SERVICE, proof).sound


@pytest.mark.parametrize(
    ("bound", "reached"), [("0.0.0.0", "127.0.0.1:7"), ("::", "[::1]:7"), ("10.0.0.8", "10.0.0.8:7"), ("h.x", "h.x:7")]
)
def test_addresses(bound, reached):
    assert str(Endpoint(bound, 7)) == reached


NAMES = ["choices", "text", "usage", "completion_tokens", "meta_info", "spec_accept_length", "internal_states"]
NAMES += ["avg_spec_accept_length", "speculative_algorithm", "x"]
json_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
for _depth in range(3):
    json_values |= st.lists(json_values, max_size=2) | st.dictionaries(st.sampled_from(NAMES), json_values, max_size=4)
bodies = json_values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60)
metrics = st.lists(
    st.sampled_from([b"sglang:spec_accept_length", b'{a="b"}', b" ", b"1e309", b"NaN", b"4", b"-", b"\n", b"#"]),
    max_size=12,
).map(b"".join)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.sampled_from([200, 200, 200, 401, 500]), min_size=4, max_size=4),
    bodies,
    bodies,
    bodies,
    bodies | metrics,
)
def test_any_answer_can_be_taken(engine, statuses, completion, generate, info, page):
    paths = ("/v1/completions", "/generate", "/server_info", "/metrics")
    contents = zip(paths, zip(statuses, (completion, generate, info, page), strict=True), strict=True)
    engine.answers = dict(contents)
    proof = prove(engine.endpoint, SERVICE)
    json.dumps(proof, allow_nan=False)
    assert all(value > 0 for value in proof["accept_length"].values())
    judge(SERVICE, proof)


def test_secrets_are_hidden(tmp_path):
    (tmp_path / "x.secrets.env").write_text('A="va\\"lue-1"\nB=va"lue-1-and-more\nC=abc\n')
    (tmp_path / "x.yaml").write_text("tp-size: 2\napi-key: 'engine-key'\nadmin-api-key: other-key # \nmodel: x\n")
    secrets = Secrets({"secrets_path": str(tmp_path / "x.secrets.env"), "engine_config": str(tmp_path / "x.yaml")})
    assert secrets.api_key == "engine-key"
    assert secrets.hide('one va"lue-1-and-more two va"lue-1 engine-key abc') == "one *** two *** *** abc"
    none = Secrets({"secrets_path": str(tmp_path / "none"), "engine_config": str(tmp_path / "none")})
    assert (none.api_key, none.hide("x")) == (None, "x")
