"""Start, stop and watch an installed service until it serves; and its log."""

from __future__ import annotations

import calendar
import os
import select
import subprocess
import time
from typing import Any, Dict, List, Optional

from .call import Call
from .endpoint import HEALTH_LIMIT_S, Endpoint, Secrets, prove
from .installation import Installation
from .managers import SYSTEMD
from .protocol import AgentError
from .unitfiles import secrets_problems

JOURNAL_LINES = 400
DEFAULT_DEADLINE_S = 1800.0
_RUNNING = ("active", "activating")
_SLOWEST_POLL_S = 2.0
_GENERATE_PAUSE_S = 5.0  # asking costs a generated token
_STOP_GRACE_S = 30.0


class Ended(Exception):
    """The service ended instead of getting ready."""


class Runner:
    """One installed service under way."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.installation = Installation(call)
        self.service = self.installation.service()
        self.installed: str = self.installation.layers()[-1]["time"]
        self.manager = self.installation.manager(self.service)
        self.secrets = Secrets(self.service)
        self.endpoint = Endpoint(self.service["address"], self.service["port"], self.secrets.api_key)
        self.began = time.monotonic()
        self.notes: List[str] = []
        self._phase = ""

    @property
    def elapsed(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.began

    def say(self, phase: str, limit_s: float) -> None:
        """Tell the client what is waited for; a new phase also as a message. Raises AgentError DD308 if it left."""
        if phase != self._phase:
            self._phase = phase
            self.call.message({"phase": phase, "elapsed_s": round(self.elapsed, 1)})
        self.call.progress(int(self.elapsed), int(limit_s), phase)
        if self.call.deaf or self.call.client_gone():
            raise AgentError("DD308", "the client went away; the service was left as it is")

    # --- stop

    def stop(self) -> None:
        """Stop it and wait until it has. Raises AgentError DD605 when it does not."""
        state = self.manager.state()
        if state["active"] not in ("active", "activating", "deactivating"):
            if state["active"] == "failed":
                self.manager.settle()
            return
        limit = self.elapsed + state["stop_limit_s"] + _STOP_GRACE_S
        self.manager.begin_stop()
        pause = 0.1
        while True:
            state = self.manager.state()
            if state["active"] in ("inactive", "failed"):
                break
            if self.elapsed > limit:
                raise AgentError("DD605", "%s did not stop within %d s" % (self.installation.files.name, limit))
            self.say("stopping", limit)
            time.sleep(pause)
            pause = min(_SLOWEST_POLL_S, pause * 1.5)
        self.manager.settle()

    # --- start

    def start(self, deadline_s: float, enable: bool) -> Dict[str, Any]:
        """Start it, unless it runs, and follow it until it serves, ends, or the deadline has passed."""
        problems = secrets_problems(self.service.get("secrets_path"), self.service["secrets"])
        if problems:
            raise AgentError("DD605", "the service's secrets are not in order", "mend the file on the host", problems)
        state = self.manager.state()
        self.notes += state["notes"]
        if state["active"] in _RUNNING:
            installed = calendar.timegm(time.strptime(self.installed, "%Y-%m-%dT%H:%M:%SZ"))
            old = state["since"] is not None and state["since"] < installed
            self.notes.append(
                "it was running already" + (", with the install from before: `launch --restart`" if old else "")
            )
        else:
            if self.endpoint.is_taken():
                raise AgentError(
                    "DD605",
                    "something else listens on %s" % self.endpoint,
                    "stop it, or give the service another port and install it again",
                )
            self.manager.settle()
            self.manager.start()
        failure: Optional[str] = None
        try:
            if not self._follow(deadline_s):
                failure = "it was not ready after %d s, and was left running" % deadline_s
        except Ended as ended:
            failure = str(ended)
        state = self.manager.state()
        if failure is not None:
            log = [self.secrets.hide(line) for line in self.manager.recent(JOURNAL_LINES)]
            if state["active"] in _RUNNING and self.elapsed < deadline_s:
                # What ended once before it was ready would go on to be restarted.
                self.stop()
                failure += "; it was stopped, so that it is not restarted over and over"
            return self.report(state, failure=failure, log=log)
        self.say("asking for a completion", deadline_s)
        proof = prove(self.endpoint, self.service)
        state = self.manager.state()
        if enable and not state["enabled"]:
            state["enabled"] = self.manager.enable(True)
            if not state["enabled"]:
                self.notes.append("nothing here starts it at boot: it is no unit of systemd")
        return self.report(state, proof=proof)

    def report(self, state: Dict[str, Any], **more: Any) -> Dict[str, Any]:
        """The answer to the client: how the service stands, and what more there is to say."""
        return {
            "unit": self.installation.files.name,
            "service": self.service,
            "state": state,
            "endpoint": str(self.endpoint),
            "elapsed_s": round(self.elapsed, 1),
            "failure": None,
            "log": [],
            "proof": None,
            "notes": self.notes,
            "generations": len(self.installation.layers()),
            **more,
        }

    def _follow(self, deadline_s: float) -> bool:
        """Whether it got ready in time. Raises Ended."""
        run: Optional[str] = None
        pause, asked = 0.1, -_GENERATE_PAUSE_S
        while self.elapsed < deadline_s:
            state = self.manager.state()
            if state["active"] == "active" and run is None:
                run = state["invocation"]
            restarted = run is not None and state["active"] == "active" and state["invocation"] != run
            if state["active"] in ("failed", "inactive") or state["restarting"] or restarted:
                raise Ended("it ended: %s" % (state["result"] or state["active"]))
            phase = "starting"
            if state["active"] == "active":
                status = self.endpoint.ask("/health", HEALTH_LIMIT_S)[0]
                if status is None:
                    phase = "loading, nothing listens on %s yet" % self.endpoint
                elif status != 200:
                    phase = "warming up, /health answers %d" % status
                elif self.elapsed - asked >= _GENERATE_PAUSE_S:
                    phase = "up, waiting for a first token"
                    status, asked = self.endpoint.ask("/health_generate", HEALTH_LIMIT_S)[0], self.elapsed
                    if status == 200:
                        return True
            self.say(phase, deadline_s)
            time.sleep(pause)
            pause = min(_SLOWEST_POLL_S, pause * 1.3)
        return False


def run_unit_serve(call: Call) -> Dict[str, Any]:
    """``action``: start, stop or restart; ``deadline_s`` to be ready in; ``enable``: have it started at boot."""
    runner = Runner(call)
    action = call.request.get("action")
    if runner.service["manager"] == SYSTEMD:
        runner.installation.check_root(runner.service)
    if action not in ("start", "stop", "restart"):
        raise AgentError("DD307", "unknown action %r" % (action,))
    if action in ("stop", "restart"):
        runner.stop()
    if action == "stop":
        return runner.report(runner.manager.state())
    return runner.start(float(call.request.get("deadline_s") or DEFAULT_DEADLINE_S), bool(call.request.get("enable")))


# --- log


def run_unit_log(call: Call) -> Dict[str, Any]:
    """The log as messages ``{"lines": [...]}``: the last ``lines`` of it, and with ``follow`` all that comes."""
    runner = Runner(call)
    follow = bool(call.request.get("follow"))
    lines = min(max(int(call.request.get("lines") or 0), 0), 100_000)
    argv = runner.manager.log_command(lines, follow)
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    fd, rest, ended = process.stdout.fileno(), b"", False
    try:
        while not call.deaf:
            ready, _writable, _failed = select.select([fd], [], [], 1.0)
            if call.client_gone():
                break
            if not ready:
                continue
            piece = os.read(fd, 1 << 16)
            if not piece:
                ended = True
                break
            whole, newline, rest = (rest + piece).rpartition(b"\n")
            if newline:
                found = whole.decode("utf-8", "replace").split("\n")
                call.message({"lines": [runner.secrets.hide(line) for line in found]})
        if rest:
            call.message({"lines": [runner.secrets.hide(rest.decode("utf-8", "replace"))]})
    finally:
        if not ended:
            process.terminate()
        status = process.wait()
    return {"unit": runner.installation.files.name, "status": status}
