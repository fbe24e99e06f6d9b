"""``python -m tests.bench``: every job, everybody who does it, in one run; one table.

Contenders take turns, round by round, after one round that does not count. Every command starts a process of its
own and a connection of its own. What it did is checked each time, outside of the time that counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ddtree_deploy.snapshots import wheels
from tests.bench.ground import Ground, at_distance, ground
from tests.bench.jobs import Job, jobs

ENGINE = "0.5.11"


def measure(ground_: Ground, job: Job, rounds: int) -> dict[str, list[float]]:
    """Seconds of every counted round, by contender."""
    times: dict[str, list[float]] = {contender.name: [] for contender in job.contenders}
    for number in range(rounds + 1):
        for contender in job.contenders:
            contender.before()
            began = time.perf_counter()
            done = ground_.run(contender.command)
            seconds = time.perf_counter() - began
            contender.done(done.stdout)
            contender.after()
            if number:
                times[contender.name].append(seconds)
    return times


def row(job: Job, times: dict[str, list[float]], round_trip: int) -> dict[str, Any]:
    """A job's medians in seconds, this program's ratio to each other one, and whether the aims were met."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    own = next(iter(medians))
    ratios = {name: medians[own] / value for name, value in medians.items() if name != own}
    aims = {
        peer: {"at_most": wanted[round_trip], "met": ratios[peer] <= wanted[round_trip]}
        for peer, wanted in job.aims.items()
        if round_trip in wanted
    }
    return {"job": job.name, "round_trip_ms": round_trip, "seconds": medians, "ratio": ratios, "aims": aims}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| job | round trip | seconds (median) | against | ratio | aim |", "|---|---|---|---|---|---|"]
    for item in rows:
        (own, seconds), *others = item["seconds"].items()
        lines.append(f"| {item['job']} | {item['round_trip_ms']} ms | **{seconds:.2f}** {own} | | | |")
        for name, value in others:
            aim = item["aims"].get(name)
            met = f"{aim['at_most']:.2f}: {'met' if aim['met'] else '**missed**'}" if aim else ""
            lines.append(f"| | | | {name}: {value:.2f} | {item['ratio'][name]:.2f} | {met} |")
    return "\n".join(lines)


def main() -> int:
    """Run, print the table, write the figures; status 1 where an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-trips", default="0,50", help="in milliseconds")
    parser.add_argument("--only", help="jobs whose name begins so")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--wheel", type=Path)
    options = parser.parse_args()
    missing = [
        name
        for name in ("ssh", "sshd", "rsync", "git")
        if not shutil.which(name, path="/usr/sbin:" + os.environ.get("PATH", ""))
    ]
    if missing:
        raise SystemExit(f"the benchmark needs {', '.join(missing)}: install it, or see the README")
    ansible = shutil.which("ansible-playbook") is not None
    if not ansible:
        print("ansible is not here: its rows are left out", file=sys.stderr)
    sources = wheels.Sources(wheels.wheelhouses_by_environment(), download=True, announce=print)
    wheel = options.wheel or wheels.find_wheel(ENGINE, sources=sources)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ddtree-bench-") as folder, ground(Path(folder), wheel) as (site, server):
        for round_trip in map(int, options.round_trips.split(",")):
            with at_distance(site, server, round_trip):
                for job in jobs(site, ansible=ansible):
                    if options.only and not job.name.startswith(options.only):
                        continue
                    if round_trip and job.name == "--help":
                        continue
                    print(f"{job.name}, {round_trip} ms ...", file=sys.stderr)
                    rows.append(row(job, measure(site, job, options.rounds), round_trip))
                    commands = {one.name: shlex.join(one.command) for one in job.contenders}
                    rows[-1]["commands"] = {name: text.replace(folder, "$W") for name, text in commands.items()}
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"engine": ENGINE, "rounds": options.rounds, "rows": rows}, indent=1) + "\n")
    return int(any(not aim["met"] for item in rows for aim in item["aims"].values()))


if __name__ == "__main__":
    sys.exit(main())
