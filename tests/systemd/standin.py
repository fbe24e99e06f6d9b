"""A stand-in for the engine: speaks its health, information, completion and metrics interface. Standard library only.

What it does is chosen by the variable STANDIN: ``serve``; ``crash`` (while loading, with a message that the engine
has for it); ``hang`` (loads for ever); ``deaf`` (its drafts are never accepted); ``chain`` (another algorithm);
``mute`` (no completion). A patched "engine" may crash, too. ``/kill`` ends it the way the engine ends itself.
"""

import http.server
import json
import os
import signal
import sys
import time

with open(os.environ.get("STANDIN_SITE", "/opt/site") + "/sglang/srt/mode.py") as handle:
    ENGINE = handle.read()
# A patch of the engine's own file goes before the environment.
MODE = "crash" if "crash" in ENGINE else os.environ.get("STANDIN", "serve")
STARTED = time.monotonic()


def flag(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


ACCEPT = 1.0 if MODE == "deaf" else 4.2
ALGORITHM = "EAGLE" if MODE == "chain" else flag("--speculative-algorithm")


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body, kind="application/json"):
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self):
        key = os.environ.get("STANDIN_API_KEY")
        if key and self.headers.get("Authorization") != "Bearer " + key:
            self.answer(401, {"error": "Unauthorized"})
            return False
        return True

    def do_GET(self):
        warm = time.monotonic() - STARTED > 0.3
        if self.path in ("/health", "/health_generate"):
            self.answer(200 if warm else 503, "")
        elif not self.allowed():
            return
        elif self.path == "/server_info":
            known = {
                "api_key": "must-not-travel",
                "speculative_algorithm": ALGORITHM,
                "tp_size": int(flag("--tp-size", "1")),
                "internal_states": [{"avg_spec_accept_length": ACCEPT}],
            }
            self.answer(200, known)
        elif self.path == "/metrics":
            self.answer(200, f'sglang:spec_accept_length{{tp_rank="0"}} {ACCEPT}\n', "text/plain")
        else:
            self.answer(404, {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.allowed():
            return
        if self.path == "/v1/completions":
            text = "" if MODE == "mute" else " thirteen, fourteen, fifteen,"
            choices = [{"text": text, "index": 0}]
            self.answer(200, {"choices": choices, "model": asked["model"], "usage": {"completion_tokens": 6}})
        elif self.path == "/generate":
            self.answer(200, {"text": "x", "meta_info": {"spec_accept_length": ACCEPT}})
        else:
            self.answer(404, {})

    def log_message(self, *_words):
        pass


def main():
    folder = os.environ.get("CACHE_DIRECTORY") or os.environ.get("STANDIN_FOLDER") or "/tmp"
    with open(folder + "/seen.json", "w") as handle:
        json.dump({"argv": sys.argv[1:], "environ": dict(os.environ), "uid": os.getuid()}, handle)
    print(f"server_args=ServerArgs(token={os.environ.get('HF_TOKEN')!r})", flush=True)
    if MODE == "crash":
        print("Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory.", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "hang":
        time.sleep(3600)
    time.sleep(0.15)
    server = http.server.ThreadingHTTPServer((flag("--host", "127.0.0.1"), int(flag("--port"))), Handler)
    # As the engine: asked to stop, it drains and then kills its own tree.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    print("The server is fired up and ready to roll!", flush=True)
    server.serve_forever()


main()
