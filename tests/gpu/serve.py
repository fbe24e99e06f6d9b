"""One engine process: start it, put it through its steps, append each result to a file.

python -m tests.gpu.serve JOB.json
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.gpu import store
from tests.gpu.compare import gap_key
from tests.gpu.probe import run_scheduler_with_probe

GREEDY = {"temperature": 0, "ignore_eos": True}
TOP = 5
ARRIVAL_SECONDS = 0.03
# Without the GPU between two parts, for another engine to take it.
TURN_SECONDS = 0.3


class Server:
    """A running engine and what its steps need."""

    def __init__(self, job: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine
        from tokenizers import Tokenizer

        class ProbedEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler_with_probe)

        self.job = job
        self.models = Path(job["models"])
        self.flags = Path(job["flags"])
        self.calls = itertools.count()
        self.tokenizer = Tokenizer.from_file(str(self.models / "target/tokenizer.json"))
        start = time.time()
        self.engine = ProbedEngine(**job["arguments"])
        self.started_in = time.time() - start

    # -- helpers -------------------------------------------------------------------------------------

    def probe(self, command: str, **arguments: Any) -> Any:
        answer = self.flags / f"{self.job['name']}.{next(self.calls)}"
        self.engine.collective_rpc("gpu_probe", command=command, answer=str(answer), **arguments)
        result = json.loads(answer.read_text())
        if "error" in result:
            raise RuntimeError(result["error"])
        return result["value"]

    def prompts(self, step: dict[str, Any]) -> list[list[int]]:
        texts = json.loads((self.models / step["prompts"]).read_text())["prompts"]
        return [self.tokenizer.encode(text).ids for text in texts[: step["count"]]]

    def generate(self, prompts: list[list[int]], params: Any, **more: Any) -> list[dict[str, Any]]:
        return self.engine.generate(input_ids=prompts, sampling_params=params, **more)

    def in_batches(self, prompts: list[list[int]], new: int, batch: int) -> list[dict[str, Any]]:
        params = {**GREEDY, "max_new_tokens": new}
        return [
            answer
            for start in range(0, len(prompts), batch)
            for answer in self.generate(prompts[start : start + batch], params)
        ]

    def staggered(self, prompts: list[list[int]], length: Callable[[int], int]) -> list[dict[str, Any]]:
        """Requests that arrive while others run, and end at different lengths."""

        async def one(number: int, prompt: list[int]) -> dict[str, Any]:
            await asyncio.sleep(number * ARRIVAL_SECONDS)
            params = {**GREEDY, "max_new_tokens": length(number)}
            return await self.engine.async_generate(input_ids=prompt, sampling_params=params)

        async def every() -> list[dict[str, Any]]:
            return list(await asyncio.gather(*(one(*item) for item in enumerate(prompts))))

        return self.engine.loop.run_until_complete(every())

    def configure(self, step: dict[str, Any]) -> None:
        drafter = step.get("drafter")
        self.probe(
            "configure",
            drafter=str(self.models / drafter) if drafter and not drafter.startswith("large") else None,
            eager=step.get("eager", False),
            spine=step.get("spine"),
            topk=step.get("topk"),
            leak=step.get("leak", False),
        )

    # -- steps ---------------------------------------------------------------------------------------

    def step_prompts(self, step: dict[str, Any]) -> Any:
        return {"prompts": self.prompts(step)}

    def step_generate(self, step: dict[str, Any]) -> Any:
        prompts = self.prompts(step)
        pools = self.probe("pools")
        start = time.time()
        if step["arrival"] == "staggered":
            new = step["new"]
            answers = self.staggered(prompts, lambda number: new - (number * 5) % (new // 2))
        else:
            answers = self.in_batches(prompts, step["new"], step["arrival"])
        return {**_outputs(answers), "seconds": time.time() - start, "pools": [pools, self.settled_pools(pools)]}

    def settled_pools(self, before: dict[str, int]) -> dict[str, int]:
        """The pools once the last request is gone, which may be a moment after its answer."""
        for _ in range(20):
            after = self.probe("pools")
            if after == before:
                break
            time.sleep(0.05)
        return after

    def step_mixed(self, step: dict[str, Any]) -> Any:
        """Greedy requests, every second one of a batch; the others are sampled."""
        prompts = self.prompts(step)
        mixed = [prompt for prompt in prompts for _ in range(2)]
        hot = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": step["new"]}
        params = [{**GREEDY, "max_new_tokens": step["new"]}, hot] * len(prompts)
        answers = [
            answer
            for start in range(0, len(mixed), 8)
            for answer in self.generate(mixed[start : start + 8], params[start : start + 8])
        ]
        return {**_outputs(answers[::2]), "sampled": _outputs(answers[1::2])["outs"]}

    def step_oracle(self, step: dict[str, Any]) -> Any:
        """The prompts as drafted, then with the outputs so far hidden among the candidates.

        Where rounding tips a near-tie, the rest is another text: a pass knows those of the passes before.
        """
        prompts = self.prompts(step)
        passes = [_outputs(self.in_batches(prompts, step["new"], step["arrival"]))]
        texts: list[list[int]] = []
        for _ in range(step["passes"]):
            outs = passes[-1]["outs"]
            texts += [[*prompt, *output] for prompt, output in zip(prompts, outs, strict=True)]
            self.configure(step)
            self.probe("start_oracle", texts=texts, ranks=step["ranks"])
            passes.append(_outputs(self.in_batches(prompts, step["new"], step["arrival"])))
        return {**passes[-1], "passes": passes}

    def step_stops(self, step: dict[str, Any]) -> Any:
        """Every output again, with a token of it as a stop token."""
        prompts = self.prompts(step)
        full = [answer["output_ids"] for answer in self.in_batches(prompts, 96, 1)]
        stops = [output[20 + 3 * number] for number, output in enumerate(full)]
        cut = [
            self.generate([prompt], [{"temperature": 0, "max_new_tokens": 96, "stop_token_ids": [stop]}])[0]
            for prompt, stop in zip(prompts, stops, strict=True)
        ]
        return {
            "full": full,
            "stops": stops,
            "cut": [answer["output_ids"] for answer in cut],
            "reasons": [answer["meta_info"]["finish_reason"] for answer in cut],
            "pools": self.probe("pools"),
        }

    def step_sample(self, step: dict[str, Any]) -> Any:
        prompt = self.prompts({**step, "count": step["prompt"] + 1})[-1]
        params = {"temperature": step["temperature"], "ignore_eos": True, "max_new_tokens": step["new"]}
        answers = self.generate([prompt] * step["samples"], params)
        return {"counts": Counter(",".join(map(str, answer["output_ids"])) for answer in answers)}

    def step_state(self, step: dict[str, Any]) -> Any:
        prompts = self.prompts(step)
        self.probe("start_state_watch", number=step["round"])
        self.in_batches(prompts, 128, len(prompts))
        prefixes = self.probe("decoded_prefixes")
        one = {**GREEDY, "max_new_tokens": 1}
        for length in (None, -1):
            self.generate([prefix[:length] for prefix in prefixes], one)
        return {"states": self.probe("read_state_watch")}

    def step_turns(self, step: dict[str, Any]) -> Any:
        """A second turn of every prompt: right after the first, and again with an empty cache."""
        prompts = self.prompts(step)
        self.engine.flush_cache()
        first = self.staggered(prompts, lambda number: step["first"] + 11 * number)
        tails = [prompt[:12] for prompt in reversed(prompts)]
        second = [
            [*prompt, *answer["output_ids"], *tail] for prompt, answer, tail in zip(prompts, first, tails, strict=True)
        ]
        hot = self.in_batches(second, step["second"], 8)
        self.engine.flush_cache()
        cold = self.in_batches(second, step["second"], 8)
        self.engine.flush_cache()
        return {
            "prompts": second,
            "first_prompts": prompts,
            "hot": _outputs(hot),
            "cold": _outputs(cold),
            "cached": [answer["meta_info"]["cached_tokens"] for answer in hot],
            "cold_cached": [answer["meta_info"]["cached_tokens"] for answer in cold],
        }

    def step_sync(self, step: dict[str, Any]) -> Any:
        prompts = self.prompts({"prompts": "prompts-text.json", "count": step["batch"]})
        tree = self.job["arguments"]["speculative_algorithm"] == "DDTREE"
        result = {}
        runs = [("warn", False), ("error", True)] if tree else [("warn", False)]
        for mode, exempt in runs:
            self.configure(step)
            self.probe("start_sync_watch", mode=mode, exempt_read_back=exempt)
            self.in_batches(prompts, 48, step["batch"])
            result[mode] = self.probe("read_sync_watch")
        return result

    def step_clock(self, step: dict[str, Any]) -> Any:
        """Several parts, taking turns with other engines: what slows the machine down slows all."""
        parts = []
        for _ in range(step["repeats"]):
            with _alone(self.flags):
                self.probe("release")
                self._rounds(step)
                self.probe("start_clock")
                self._rounds(step)
                parts.append(self.probe("read_clock"))
            time.sleep(TURN_SECONDS)
        return {"batch": step["batch"], "parts": parts, "memory": self.probe("memory")}

    def step_breakdown(self, step: dict[str, Any]) -> Any:
        self._rounds(step)
        self.probe("start_breakdown")
        self._rounds(step)
        return {"batch": step["batch"], "spans": self.probe("read_breakdown")}

    def step_kernels(self, step: dict[str, Any]) -> Any:
        self.probe("start_kernels", first=8, rounds=8)
        self._rounds(step)
        return {"batch": step["batch"], "kernels": self.probe("read_kernels")}

    def _rounds(self, step: dict[str, Any]) -> None:
        if step["drafter"].startswith("large"):
            draw = random.Random(step["batch"])
            prompts = [
                [draw.randrange(10, step["vocabulary"]) for _ in range(step["length"])] for _ in range(step["batch"])
            ]
        else:
            prompts = self.prompts({"prompts": "prompts-text.json", "count": step["batch"]})
        self.in_batches(prompts, step["new"], step["batch"])

    def step_gaps(self, step: dict[str, Any]) -> Any:
        """The likeliest next tokens after each queried sequence, once the other engines are done."""
        target = self.job["target"]
        queries = self.wait_for(f"queries-{target}.json")
        answers = {}
        for start in range(0, len(queries), 64):
            some = queries[start : start + 64]
            results = self.generate(
                some, {**GREEDY, "max_new_tokens": 1}, return_logprob=True, top_logprobs_num=TOP, logprob_start_len=-1
            )
            for query, result in zip(some, results, strict=True):
                top = result["meta_info"]["output_top_logprobs"][0]
                answers[gap_key(query, target)] = [[logprob, token] for logprob, token, *_ in top]
        return {"answers": answers}

    def wait_for(self, name: str) -> Any:
        while not (self.flags / name).exists():
            time.sleep(0.2)
        return json.loads((self.flags / name).read_text())


def _outputs(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "outs": [answer["output_ids"] for answer in answers],
        "verifies": [answer["meta_info"].get("spec_verify_ct") or 0 for answer in answers],
        "lengths": [answer["meta_info"].get("spec_accept_length") for answer in answers],
        "rates": [answer["meta_info"].get("spec_accept_rate") for answer in answers],
    }


@contextlib.contextmanager
def _alone(flags: Path) -> Iterator[None]:
    """Wait until no engine starts or works, and until it is this one's turn."""
    while not (flags / "exclusive.go").exists():
        time.sleep(0.1)
    with (flags / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(job_file: str) -> None:
    """Run a job. A step that fails is said and left without a result; the others go on."""
    job = json.loads(Path(job_file).read_text())
    flags = Path(job["flags"])
    server = Server(job)
    failed = 0
    print(f"UP {job['name']} {server.started_in:.0f} s", flush=True)
    for step in job["steps"]:
        exclusive = step["spec"].get("exclusive", False)
        if exclusive or step["spec"]["kind"] == "gaps":
            (flags / f"{job['name']}.shared-done").touch()
        record = {"key": step["key"], "engine": job["name"], "step": step["spec"], "digest": job["digest"]}
        start = time.time()
        try:
            with _alone(flags) if exclusive and step["spec"]["kind"] != "clock" else contextlib.nullcontext():
                server.configure(step["spec"])
                record["result"] = getattr(server, f"step_{step['spec']['kind']}")(step["spec"])
        except Exception:  # noqa: BLE001
            print(traceback.format_exc(), flush=True)
            print(f"FAILED {step['spec']['name']}", flush=True)
            failed += 1
            continue
        if step["spec"]["kind"] == "gaps":
            # Each part's answers add to those before.
            record["key"] += f"-{gap_key(sorted(int(key, 16) for key in record['result']['answers']), '')}"
        store.append(Path(job["results"]), record)
        print(f"DONE {step['spec']['name']} {time.time() - start:.1f} s", flush=True)
    (flags / f"{job['name']}.shared-done").touch()
    server.engine.shutdown()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
