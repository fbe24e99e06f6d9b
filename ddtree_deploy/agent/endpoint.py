"""The engine's HTTP interface, asked from its own host; nothing of a request or answer that is secret leaves it."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import socket
from typing import Any, Dict, List, Optional, Tuple

from .unitfiles import read_assignments

ANSWER_LIMIT = 8 << 20  # bytes
HEALTH_LIMIT_S = 30.0  # the engine itself gives up after 20 s
COMPLETION_LIMIT_S = 300.0  # the first request may compile kernels
PROMPT = "Count on: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,"
TOKENS = 64
_SHORTEST_SECRET = 4
_METRIC = re.compile(r"^sglang[:_](spec_[a-z_]+|gen_throughput|num_running_reqs)(?:\{[^}]*\})?\s+(\S+)")
_API_KEY = re.compile(r"^\s*(?:api[-_]key|admin[-_]api[-_]key)\s*:\s*(.+?)\s*$", re.MULTILINE)
# What of /server_info may travel: it also holds the keys.
_TOLD = (
    "version",
    "model_path",
    "served_model_name",
    "tp_size",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_ddtree_budget",
    "speculative_ddtree_topk",
    "max_running_requests",
    "mem_fraction_static",
    "attention_backend",
)


class Secrets:
    """The values that must not be shown: those of the secrets file, and the keys of the engine's own file."""

    def __init__(self, service: Dict[str, Any]) -> None:
        self.api_key: Optional[str] = None
        values: List[str] = []
        if service.get("secrets_path"):
            with contextlib.suppress(OSError):
                values += read_assignments(service["secrets_path"]).values()
        if service.get("engine_config"):
            keys = _api_keys(service["engine_config"])
            self.api_key = keys[0] if keys else None
            values += keys
        # The longest first: one may be part of another.
        self._values = sorted({value for value in values if len(value) >= _SHORTEST_SECRET}, key=len, reverse=True)

    def hide(self, line: str) -> str:
        """``line`` without the values."""
        for value in self._values:
            line = line.replace(value, "***")
        return line


def _api_keys(path: str) -> List[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            found = _API_KEY.findall(handle.read(1 << 20))
    except OSError:
        return []
    return [value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value for value in found]


class Endpoint:
    """Where the engine listens. ``address`` is what it binds; an unspecified one is reached on loopback."""

    def __init__(self, address: str, port: int, api_key: Optional[str] = None) -> None:
        self.address = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}.get(address, address)  # noqa: S104
        self.port = port
        self._api_key = api_key

    def __str__(self) -> str:
        return "%s:%d" % ("[%s]" % self.address if ":" in self.address else self.address, self.port)

    def is_taken(self) -> bool:
        """Whether anybody listens there."""
        try:
            socket.create_connection((self.address, self.port), 2.0).close()
        except OSError:
            return False
        return True

    def ask(self, path: str, limit_s: float, body: Any = None) -> Tuple[Optional[int], Any, str]:
        """GET, or POST of a JSON ``body``: the status, the answer (JSON decoded, else text) and what went wrong.

        The status is None where there was no answer at all. No proxy is used.
        """
        headers = {"Authorization": "Bearer " + self._api_key} if self._api_key else {}
        connection = http.client.HTTPConnection(self.address, self.port, timeout=limit_s)
        try:
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                headers["Content-Type"] = "application/json"
                connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read(ANSWER_LIMIT).decode("utf-8", "replace")
            status = response.status
        except (OSError, http.client.HTTPException, ValueError) as error:
            return None, None, "%s: %s" % (path, str(error) or type(error).__name__)
        finally:
            connection.close()
        try:
            return status, json.loads(text), "" if status == 200 else "%s answers %d" % (path, status)
        except (ValueError, RecursionError):
            return status, text, "" if status == 200 else "%s answers %d" % (path, status)


def prove(endpoint: Endpoint, service: Dict[str, Any]) -> Dict[str, Any]:
    """What a ready engine shows when it is used: a completion, what it says of itself, its metrics.

    Plain data for :mod:`ddtree_deploy.serve.verdict`: ``completion`` ({"tokens", "text"} or None), ``server``,
    ``accept_length`` by source, ``metrics``, ``problems`` (requests that failed).
    """
    problems: List[str] = []

    def ask(path: str, limit_s: float, body: Any = None) -> Any:
        status, answer, why = endpoint.ask(path, limit_s, body)
        if status != 200:
            if status in (401, 403):
                why += " (it wants an API key that neither `engine_config` nor the secrets file gives)"
            problems.append(why)
            return None
        return answer

    asked = {"model": service["model"], "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    completion = _completion(ask("/v1/completions", COMPLETION_LIMIT_S, asked))
    accept: Dict[str, float] = {}
    if service["algorithm"] != "none":
        own = {"text": PROMPT, "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0}}
        answer = endpoint.ask("/generate", COMPLETION_LIMIT_S, own)[1]
        _note(accept, "request", _dig(answer, "meta_info", "spec_accept_length"))
    # The old name, which 0.5.11 still serves, is the only one of earlier versions.
    status, told, _why = endpoint.ask("/server_info", HEALTH_LIMIT_S)
    if status == 404:
        told = ask("/get_server_info", HEALTH_LIMIT_S)
    elif status != 200:
        told = ask("/server_info", HEALTH_LIMIT_S)
    told = told if isinstance(told, dict) else {}
    states = told.get("internal_states")
    _note(accept, "server", _dig(states[0] if isinstance(states, list) and states else None, "avg_spec_accept_length"))
    metrics = _metrics(ask("/metrics", HEALTH_LIMIT_S)) if service["metrics"] else {}
    _note(accept, "metrics", metrics.get("spec_accept_length"))
    return {
        "completion": completion,
        "server": {
            key: told[key]
            for key in _TOLD
            if isinstance(told.get(key), (str, int, float, bool, type(None))) and key in told
        },
        "accept_length": accept,
        "metrics": metrics,
        "problems": problems,
    }


def _completion(answer: Any) -> Optional[Dict[str, Any]]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    text = _dig(choices[0] if isinstance(choices, list) and choices else None, "text")
    if not isinstance(text, str):
        return None
    tokens = _dig(answer, "usage", "completion_tokens")
    return {"text": text[:400], "tokens": tokens if isinstance(tokens, int) else None}


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _note(accept: Dict[str, float], source: str, value: Any) -> None:
    # 0 stands for "nothing was decoded yet".
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        accept[source] = float(value)


def _metrics(text: Any) -> Dict[str, float]:
    """The speculation's gauges out of a Prometheus page; of several label sets the largest value."""
    found: Dict[str, float] = {}
    for line in text.splitlines() if isinstance(text, str) else []:
        match = _METRIC.match(line)
        if match:
            try:
                value = float(match.group(2))
            except ValueError:
                continue
            if math.isfinite(value):
                found[match.group(1)] = max(value, found.get(match.group(1), value))
    return found
