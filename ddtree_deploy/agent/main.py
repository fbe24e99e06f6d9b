"""The agent's entry: read one request from stdin, run the named operation, answer on stdout."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Dict

from . import protocol
from .call import Call, read_request
from .protocol import AgentError, MessageReader, MessageWriter, ProtocolError

# operation -> (module of this package, function(call) -> result)
OPERATIONS = {
    "facts": ("root", "run_facts"),
    "snapshot": ("manifest", "run_snapshot"),
    "grep": ("search", "run_grep"),
    "find_def": ("search", "run_find_def"),
    "plan": ("standing", "run_status"),
    "status": ("standing", "run_status"),
    "stored": ("standing", "run_stored"),
    "apply": ("transact", "run_apply"),
    "rollback": ("rollback", "run_rollback"),
    "recover": ("transact", "run_recover"),
    "outcome": ("standing", "run_outcome"),
    "history": ("standing", "run_history"),
    "units": ("install", "run_units"),
    "units_recover": ("install", "run_units_recover"),
    "unit_look": ("install", "run_unit_look"),
    "unit_install": ("install", "run_unit_install"),
    "unit_restore": ("install", "run_unit_restore"),
    "unit_outcome": ("install", "run_unit_outcome"),
    "unit_serve": ("serving", "run_unit_serve"),
    "unit_log": ("serving", "run_unit_log"),
    "doctor": ("doctor_facts", "run_doctor"),
    "models": ("models", "run_models"),
}


def main(nonce: str) -> int:
    """Serve one call on stdin/stdout; returns the process's exit status (0 also for a reported error)."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.umask(0o022)
    out = sys.stdout.buffer
    writer = MessageWriter(out.write, out.flush)
    reader = MessageReader(sys.stdin.buffer.read)
    blobs: Dict[str, bytes] = {}
    out.write(protocol.MAGIC + nonce.encode("ascii") + b"\n")
    out.flush()
    try:
        request = read_request(reader, blobs)
    except (ProtocolError, StopIteration) as error:
        sys.stderr.write("ddtree-agent: incomplete request: %s\n" % error)
        return 3
    call = Call(request, reader, writer, sys.stdin.fileno())
    call.blobs = blobs
    try:
        where = OPERATIONS.get(str(request.get("op")))
        if where is None:
            raise AgentError("DD307", "the agent knows no operation %r" % (request.get("op"),))
        module = importlib.import_module("." + where[0], __package__)
        result = getattr(module, where[1])(call)
    except AgentError as error:
        call.finish(
            protocol.ERROR,
            dict(error.more, code=error.code, message=error.message, hint=error.hint, details=error.details),
        )
    except Exception as error:  # noqa: BLE001 - the client turns it into one line; the trace goes to stderr
        import traceback

        sys.stderr.write(traceback.format_exc())
        call.finish(
            protocol.ERROR,
            {
                "code": "DD901",
                "message": "the agent failed: %s: %s" % (type(error).__name__, error),
                "hint": None,
                "details": [],
            },
        )
    else:
        call.finish(protocol.REQUEST, result)
    return 0
