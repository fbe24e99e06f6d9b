"""A server that speaks the engine's HTTP interface and knows no model. MODE `deaf` or `crash` spoils it."""

import http.server
import json
import sys

MODE = ""
TEXT = "in the year of its first stone"


def flag(name):
    return sys.argv[sys.argv.index(name) + 1]


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body, kind="application/json"):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        accept = 1.0 if MODE == "deaf" else 2.6
        info = {"speculative_algorithm": flag("--speculative-algorithm"), "tp_size": int(flag("--tp-size"))}
        self.answer(
            {
                "/health": "",
                "/v1/models": {"data": [{"id": flag("--served-model-name")}]},
                "/server_info": {**info, "internal_states": [{"avg_spec_accept_length": accept}]},
                "/metrics": f"sglang:spec_accept_length {accept}\n",
            }[self.path]
        )

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not asked["stream"]:
            message = {"role": "assistant", "content": TEXT}
            self.answer(
                {
                    "object": "chat.completion",
                    "model": asked["model"],
                    "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
                    "usage": {"completion_tokens": 7},
                }
            )
            return
        chunks = [
            {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": piece}}]}
            for piece in (TEXT[:9], TEXT[9:])
        ]
        events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
        self.answer("".join(f"data: {event}\n\n" for event in events), "text/event-stream")

    def log_message(self, *words):
        pass


if __name__ == "__main__":
    if MODE == "crash":
        sys.exit("no GPU")
    http.server.ThreadingHTTPServer(("127.0.0.1", int(flag("--port"))), Handler).serve_forever()
