"""Run shards on a machine with a GPU, in as many parts as it takes.

    python -m tests.gpu.run --list
    python -m tests.gpu.run --only exact,leak --kit SITE --models DIR --work DIR --results FILE [--known FILE]
    python -m tests.gpu.run --report tests/gpu/report.json --results FILE

SITE is a folder with the pristine engine and what it imports, DIR the fixture's folder. A step whose result
FILE or the known one has for this patch set is not run again. Engines run side by side; steps that are timed
run alone. What is not done after `--seconds` is left for the next part: exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu import catalog, models, report, sites, store

REPOSITORY = Path(__file__).resolve().parents[2]
PATCHES = REPOSITORY / "patches"
FIRST_PORT = 31000
# Before the end, for the queries to be answered in.
QUERY_SECONDS = 40


class Running:
    """An engine's process."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, waits: set[str]) -> None:
        self.name, self.process, self.log, self.waits = name, process, log, waits

    def alive(self) -> bool:
        return self.process.poll() is None

    def shares(self, flags: Path) -> bool:
        """Whether it still starts or works at steps that others may work beside."""
        return self.alive() and not (flags / f"{self.name}.shared-done").exists()


def pending(shards: Sequence[str], known: Mapping[str, store.Record], digest: str) -> list[dict[str, Any]]:
    """Jobs for what has no result yet: `name`, `engine` and `steps` of `key` and `spec`."""
    found = []
    for job in catalog.jobs(shards):
        keyed = [(catalog.result_key(job.engine, step, digest), step) for step in job.steps]
        left = [{"key": key, "spec": step} for key, step in keyed if key not in known or step["kind"] == "gaps"]
        if left:
            found.append({"name": job.engine.name, "engine": job.engine, "steps": left})
    if all(step["spec"]["kind"] == "gaps" for job in found for step in job["steps"]):
        return [job for job in found if queries(known, digest, job["engine"].target)]
    return found


def queries(known: Mapping[str, store.Record], digest: str, target: str) -> list[list[int]]:
    """Token sequences whose likeliest next tokens by a target the report needs and nobody has asked for."""
    answers = report.answers(known.values())
    needed = {}
    for comparison in report.comparisons(report.runs(known.values(), digest)):
        for difference in comparison.found:
            if difference.target == target:
                needed.setdefault(difference.key, list(difference.before))
    return [tokens for key, tokens in needed.items() if key not in answers]


def arguments_of(engine: catalog.EngineSpec, folder: Path, number: int) -> dict[str, Any]:
    """The keyword arguments of the engine's start."""
    arguments = {
        **engine.arguments(),
        "model_path": str(folder / engine.target),
        "port": FIRST_PORT + 200 * number,
        "nccl_port": FIRST_PORT + 10000 + 100 * number,
    }
    if engine.algorithm:
        arguments["speculative_draft_model_path"] = str(folder / engine.drafter)
    return arguments


def start(job: dict[str, Any], number: int, options: argparse.Namespace, digest: str) -> Running:
    engine: catalog.EngineSpec = job["engine"]
    flags = options.work / "flags"
    path = [str(REPOSITORY), str(options.kit)]
    if engine.site != "pristine":
        site = options.work / f"{engine.site}-{digest}"
        if not site.exists():
            sites.make_site(engine.site, options.kit, options.patches, site)
        path.insert(1, str(site))
    job_file = options.work / f"{engine.name}.job.json"
    job_file.write_text(
        json.dumps(
            {
                "name": engine.name,
                "target": engine.target,
                "arguments": arguments_of(engine, options.models, number),
                "steps": job["steps"],
                "models": str(options.models),
                "flags": str(flags),
                "results": str(options.work / f"{engine.name}.results.jsonl"),
                "digest": digest,
            }
        )
    )
    log = options.work / f"{engine.name}.log"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.serve", str(job_file)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"},
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    return Running(engine.name, process, log, {_turn(step["spec"]) for step in job["steps"]})


def _turn(step: catalog.Step) -> str:
    return "gaps" if step["kind"] == "gaps" else "exclusive" if step.get("exclusive") else "shared"


def collect(options: argparse.Namespace) -> dict[str, store.Record]:
    """All results of this part and those known before."""
    return store.read([*options.known, options.results, *sorted(options.work.glob("*.results.jsonl"))])


def supervise(running: list[Running], options: argparse.Namespace, digest: str, end: float) -> None:
    """Let the engines work until all are done or the time is up; then end what still runs."""
    flags = options.work / "flags"
    begun = time.time()
    asked = not any("gaps" in engine.waits for engine in running)
    released = False
    while any(engine.alive() for engine in running) and time.time() < end:
        time.sleep(0.2)
        if time.time() < begun + options.patience and any(engine.process.poll() for engine in running):
            break
        sharing = [engine for engine in running if engine.shares(flags)]
        if not asked and (not sharing or time.time() > end - QUERY_SECONDS):
            for target in catalog.PLAIN_OF:
                part = flags / "queries.part"
                part.write_text(json.dumps(queries(collect(options), digest, target)))
                part.rename(flags / f"queries-{target}.json")
            asked = True
        answering = [engine for engine in running if "gaps" in engine.waits and engine.alive()]
        if not released and not sharing and not answering:
            (flags / "exclusive.go").touch()
            released = True
    for engine in running:
        if engine.alive():
            os.killpg(engine.process.pid, signal.SIGKILL)
            engine.process.wait()


def run(options: argparse.Namespace) -> int:
    """Run what has no result; print what each engine did. Returns the exit status."""
    end = time.time() + options.seconds
    options.work.mkdir(parents=True, exist_ok=True)
    flags = options.work / "flags"
    shutil.rmtree(flags, ignore_errors=True)
    flags.mkdir()
    models.write(options.models)
    digest = sites.set_digest(options.patches)
    todo = pending(options.only, collect(options), digest)
    print(f"set {digest}: {sum(len(job['steps']) for job in todo)} steps on {len(todo)} engines", flush=True)
    if any(job["engine"].target == "attention" for job in todo):
        models.write_attention(options.models)
    running = []
    for number, job in enumerate(todo):
        running.append(start(job, number, options, digest))
        time.sleep(options.stagger)
    supervise(running, options, digest, end)
    finished = store.read(sorted(options.work.glob("*.results.jsonl")))
    for record in finished.values():
        store.append(options.results, record)
    failed = 0
    for engine, job in zip(running, todo, strict=True):
        done = sum(any(key.startswith(step["key"]) for key in finished) for step in job["steps"])
        print(f"{engine.name}: {done} of {len(job['steps'])} steps, exit {engine.process.returncode}")
        if done < len(job["steps"]):
            failed += 1
            lines = engine.log.read_text(errors="replace").splitlines()
            told = [line for line in lines if line.startswith(("UP ", "DONE ", "FAILED "))]
            print("\n".join([*told[-3:], *lines[-options.tail :]]))
    return 1 if failed else 0


def main() -> int:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print shards, their engines and steps")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(catalog.SHARDS))
    parser.add_argument("--kit", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--results", type=Path, help="results are added to this file")
    parser.add_argument("--patches", type=Path, default=PATCHES, help="the folder of patch sets")
    parser.add_argument("--known", type=Path, action="append", default=[], help="more results, read only")
    parser.add_argument("--seconds", type=float, default=460)
    parser.add_argument("--stagger", type=float, default=1.0, help="seconds between two engines' starts")
    parser.add_argument("--patience", type=float, default=0, help="seconds in which one engine's failure ends the part")
    parser.add_argument("--tail", type=int, default=25, help="lines to print of the log of an engine that failed")
    parser.add_argument("--report", type=Path, help="write the report on all results and exit")
    options = parser.parse_args()
    if options.list:
        for name, engines in catalog.SHARDS.items():
            print(name, *(f"{engine}:{len(steps)}" for engine, steps in engines.items()))
        return 0
    if options.report:
        records = store.read([*options.known, options.results])
        written = report.build(records.values(), sites.set_digest(options.patches))
        written["sets"] = sites.family_digests(options.patches)
        options.report.write_text(json.dumps(written, indent=1) + "\n")
        print(report.summary(written))
        return 0 if written["passed"] else 1
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
