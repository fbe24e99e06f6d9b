"""An engine whose tokens are a hash of all tokens before, to run the harness without a GPU.

`FAKE_WRONG=NAME` makes the engine on the site or with the algorithm NAME differ from the sixth token on.
"""

import asyncio
import hashlib
import json
import os
import random
import time
from pathlib import Path

POOLS = {"slots": 100, "requests": 8, "states": 48}
ANSWERS = {
    "configure": None,
    "pools": POOLS,
    "memory": {"rows": 9, "steps": 16, "window_bytes": 1000},
    "start_clock": None,
    "start_breakdown": None,
    "start_sync_watch": None,
    "start_state_watch": None,
    "start_kernels": None,
    "read_kernels": {"gemm": [1.5, 24]},
    "start_oracle": None,
    "release": None,
    "decoded_prefixes": [],
    "read_state_watch": [{"length": 9, "ssm": 0.01, "conv": 0.01, "one_off_ssm": 0.5, "one_off_conv": 0.5}],
    "read_sync_watch": {"rounds": 3, "waits": {}, "fused": True},
}


def next_token(tokens):
    return int(hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:6], 16) % 50


class Engine:
    def __init__(self, **arguments):
        self.arguments = arguments
        self.loop = asyncio.new_event_loop()
        self.algorithm = arguments.get("speculative_algorithm")
        self.draw = random.Random(str(self.algorithm))

    def _answer(self, prompt, params):
        if os.environ.get("FAKE_CRASH") == str(self.algorithm):
            raise RuntimeError("the engine failed")
        tokens, new = list(prompt), []
        for step in range(params["max_new_tokens"]):
            token = next_token(tokens)
            if params["temperature"]:
                token = (token + self.draw.randrange(4)) % 50
            if step >= 5 and os.environ.get("FAKE_WRONG") == str(self.algorithm):
                token += 100
            new.append(token)
            tokens.append(token)
            if token in params.get("stop_token_ids", []):
                break
        meta = {"cached_tokens": 0, "finish_reason": {"type": "length"}}
        if self.algorithm:
            meta["spec_verify_ct"] = max(1, (len(new) - 1) // 2)
        return {"output_ids": new, "meta_info": meta}

    def generate(self, input_ids, sampling_params, return_logprob=False, **_):
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(input_ids)
        answers = [self._answer(*pair) for pair in zip(input_ids, params, strict=True)]
        for prompt, answer in zip(input_ids, answers, strict=True):
            if return_logprob:
                best = next_token(list(prompt))
                answer["meta_info"]["output_top_logprobs"] = [[[-0.1, best, None], [-3.0, best + 1, None]]]
        return answers

    async def async_generate(self, input_ids, sampling_params):
        await asyncio.sleep(0)
        return self._answer(input_ids, sampling_params)

    def flush_cache(self):
        pass

    def collective_rpc(self, method, command, answer, **arguments):
        value = ANSWERS.get(command)
        if command == "read_clock":
            start = time.time()
            value = [[b, start + i, start + i + 0.5] for b in (1, 8) for i in range(4)]
        if command == "read_breakdown":
            value = [[0, b, "draft", 1.0, 1.0] for b in (1, 8)]
        Path(answer).write_text(json.dumps({"value": value}))

    def shutdown(self):
        pass
