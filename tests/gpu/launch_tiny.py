"""The rendered launch command on a real GPU: started as it stands, asked as an OpenAI client asks, stopped.

    python -m tests.gpu.launch_tiny --kit SITE --models DIR --work WORK --out FILE [--algorithm DDTREE]

SITE and DIR are as for ``tests.gpu.run``. The service is rendered against the patched sources' own parser and the
fixture's own configurations; the rendered script is run; what it became is read back from /proc. FILE gets one JSON
object whose ``checks`` must all be true: exit status 0, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from ddtree_deploy.launch.known import Engine, Known, models_of_files
from ddtree_deploy.launch.legality import Tree
from ddtree_deploy.launch.parser import read_parser
from ddtree_deploy.launch.render import Rendering, render
from ddtree_deploy.launch.service import Service
from ddtree_deploy.launch.write import write_files
from ddtree_deploy.resources import patches_dir
from tests.gpu import sites

SERVED = "tiny-hybrid"
PROMPT = "The history of the city begins"
# What a machine needs beside the rendered environment: where its driver's libraries and its temporary files are.
PASSED_ON = ("LD_LIBRARY_PATH", "HOME", "TMPDIR", "NVIDIA_VISIBLE_DEVICES")
# Of the kit: no FlashInfer, no grammars; pools that leave the GPU to others; accept length soon after the first rounds.
ON_A_BARE_MACHINE = (
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--max-total-tokens", "20000"),
    *("--max-mamba-cache-size", "64", "--decode-log-interval", "4"),
)
SHELLS = ("PWD", "OLDPWD", "SHLVL", "_")  # set by the shell that runs the script
EXEC_SECONDS = 30
POLL_SECONDS = 0.5
STOP_SECONDS = 60
LOG_LINES = 40


def service(options: argparse.Namespace, path: str) -> Service:
    """The fixture as a service of an inventory."""
    table: dict[str, Any] = {
        "model": str(options.models / "target"),
        "served_name": SERVED,
        "algorithm": options.algorithm,
        "drafter": str(options.models / "draft"),
        "attention_backend": "triton",
        "draft_attention_backend": "triton",
        "compute_capability": options.capability,
        "gpu_memory_mib": options.gpu_memory_mib,
        "port": options.port,
        "max_running_requests": 8,
        "mem_fraction_static": options.fraction,
        "chunked_prefill_size": 2048,
        "cuda_home": options.cuda_home,
        "working_directory": str(options.work),
        "extra_args": list(ON_A_BARE_MACHINE),
        "environment": {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
    }
    if options.algorithm == "DDTREE":
        table |= {"budget": 15, "topk": 8}
    return Service.from_table("tiny", table)


def rendered(options: argparse.Namespace, site: Path) -> Rendering:
    """The launch files, checked against the site's own parser and the fixture's configurations."""

    def read(path: str) -> bytes | None:
        for folder in (site, options.kit):
            if (folder / path).is_file():
                return (folder / path).read_bytes()
        return None

    version = Version(sites.ENGINE)
    tree = Tree.of_source(read, version)
    models = models_of_files(*(options.models / name / "config.json" for name in ("target", "draft")))
    known = Known(Engine(version, read_parser(read), tree, "the site", True, True), models.model, models.drafter)
    path = os.pathsep.join(map(str, (site, options.kit)))
    return render(service(options, path), python=sys.executable, known=known)


def passed_on(options: argparse.Namespace) -> dict[str, str]:
    """What the engine gets beside its rendered environment."""
    return {name: os.environ[name] for name in (*PASSED_ON, *options.pass_on) if name in os.environ}


def without(environment: Mapping[str, str], names: Container[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


class Served:
    """The engine's process and its HTTP interface."""

    def __init__(self, script: Path, log: Path, port: int, environment: Mapping[str, str]) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.log = log
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            ["/bin/sh", script],
            env=dict(environment),
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def get(self, path: str) -> tuple[int, str]:
        return self._ask(urllib.request.Request(self.base + path))

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
        return self._ask(urllib.request.Request(self.base + path, json.dumps(body).encode(), headers))

    @staticmethod
    def _ask(request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode("utf-8", "replace")
        except OSError:
            return 0, ""

    def wait_ready(self, seconds: float) -> float | None:
        """Seconds until /health answered 200; None where it ended or did not become ready in time."""
        while time.monotonic() - self.started < seconds and self.process.poll() is None:
            if self.get("/health")[0] == 200:
                return round(time.monotonic() - self.started, 2)
            time.sleep(POLL_SECONDS)
        return None

    def became(self, program: str) -> tuple[list[str], dict[str, str]]:
        """argv and environment of the process once it runs the program; the engine may retitle itself later."""
        while self.process.poll() is None and time.monotonic() - self.started < EXEC_SECONDS:
            argv = self._proc("cmdline")
            if argv[:1] == [program]:
                return argv, dict(word.partition("=")[::2] for word in self._proc("environ"))
            time.sleep(0.001)
        return [], {}

    def _proc(self, name: str) -> list[str]:
        """The NUL-separated words of a file of the process in /proc."""
        return Path(f"/proc/{self.process.pid}/{name}").read_bytes().decode().split("\0")[:-1]

    def stop(self) -> int | None:
        """Ask it to end, and end what is left of its session."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return status


def chat(served: Served, *, stream: bool) -> dict[str, Any]:
    """One chat completion in the wire format of OpenAI's client library: what came, and whether it is well-formed."""
    body = {
        "model": SERVED,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": stream,
    }
    status, text = served.post("/v1/chat/completions", body)
    found: dict[str, Any] = {"status": status, "text": "", "sound": False}
    try:
        if stream:
            events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
            pieces = [json.loads(event) for event in events[:-1]]
            deltas = [choice["delta"] for piece in pieces for choice in piece["choices"]]
            found["text"] = "".join(delta.get("content") or "" for delta in deltas)
            found["sound"] = events[-1] == "[DONE]" and all(
                piece["object"] == "chat.completion.chunk" for piece in pieces
            )
        else:
            answer = json.loads(text)
            found["text"] = answer["choices"][0]["message"]["content"]
            found["usage"] = answer["usage"]
            found["sound"] = answer["object"] == "chat.completion" and answer["model"] == SERVED
    except (ValueError, LookupError, TypeError) as error:
        found["error"] = f"{type(error).__name__}: {error}: {text[:300]}"
    return found


def question(served: Served, rendering: Rendering) -> dict[str, Any]:
    """Everything that is asked of a ready server, and the checks on it."""
    plain, streamed = chat(served, stream=False), chat(served, stream=True)
    models = served.get("/v1/models")
    information = served.get("/server_info")
    info = json.loads(information[1]) if information[0] == 200 else {}
    states = info.get("internal_states") or [{}]
    accept = states[0].get("avg_spec_accept_length")
    metrics = served.get("/metrics")
    return {
        "chat": plain,
        "stream": streamed,
        "models": models,
        "accept_length": accept,
        "server": {name: info.get(name) for name in ("speculative_algorithm", "tp_size", "max_running_requests")},
        "checks": {
            "a chat completion is answered": plain["status"] == 200 and plain["sound"] and bool(plain["text"]),
            "so is a streamed one": streamed["status"] == 200 and streamed["sound"] and bool(streamed["text"]),
            "the model is listed by its served name": SERVED in models[1],
            "the engine runs the algorithm": info.get("speculative_algorithm") == rendering.command.service.algorithm,
            "drafts are accepted": isinstance(accept, int | float) and accept > 1,
            "metrics are served": metrics[0] == 200 and "sglang:" in metrics[1],
        },
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--kit", "--models", "--work", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--site", type=Path, help="patched sources that are there already")
    parser.add_argument("--algorithm", choices=("DDTREE", "DFLASH"), default="DDTREE")
    parser.add_argument("--capability", default="9.0")
    parser.add_argument("--gpu-memory-mib", type=int, default=143_771)
    parser.add_argument("--fraction", type=float, default=0.3)
    parser.add_argument("--cuda-home", default="/usr/local/cuda")
    parser.add_argument("--pass", dest="pass_on", action="append", default=[], metavar="NAME", help="a variable more")
    parser.add_argument("--port", type=int, default=31900)
    parser.add_argument("--seconds", type=float, default=240, help="until it must be ready")
    options = parser.parse_args(arguments)
    options.work = options.work.absolute()
    options.kit, options.models = options.kit.absolute(), options.models.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    site = options.site or options.work / f"launch-{sites.set_digest(patches_dir())}"
    if not site.exists():
        sites.make_site("patched", options.kit, patches_dir(), site)
    rendering = rendered(options, site)
    write_files(rendering.files, options.work / "launch", force=True)
    log = options.work / "launch" / "engine.log"
    served = Served(options.work / "launch" / rendering.script.name, log, options.port, passed_on(options))
    try:
        argv, environment = served.became(rendering.argv[0])
        ready = served.wait_ready(options.seconds)
        checks = {
            "the process's argv is the rendered one": argv == list(rendering.argv),
            "its environment is the rendered one and what is passed on": without(environment, SHELLS)
            == passed_on(options) | rendering.env,
            "it became ready": ready is not None,
        }
        result: dict[str, Any] = {"checks": checks, "ready_seconds": ready}
        if ready is not None:
            asked = question(served, rendering)
            result |= {**asked, "checks": result["checks"] | asked["checks"]}
    finally:
        status = served.stop()
    result |= {
        "argv": list(rendering.argv),
        "environment": rendering.env,
        "notes": [*rendering.notes, *(f"not checked: {item}" for item in rendering.command.unchecked)],
        "exit_status": status,
    }
    if not all(result["checks"].values()):
        result["log"] = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, passed in result["checks"].items() if not passed]
    print(f"ready after {ready} s; {len(result['checks']) - len(failed)} checks passed; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
