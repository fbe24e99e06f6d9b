"""The report: what was run, its figures, and for each thing to be shown whether it was."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import catalog, models
from tests.gpu.compare import NEAR_TIE, Difference, differences, verdict
from tests.gpu.stats import chi_square, marginal
from tests.gpu.store import Record

EXPECTED = Path(__file__).parent / "expected.json"
# Prompts that a configuration may differ on beyond those that the chain itself does.
MORE_THAN_CHAIN = 2
LEAK_PROMPTS = 3
GAIN_TOLERANCE = 0.05
P_VALUE = 0.001
# A round's states against a prefill's, in multiples of what the chain's rounds come to.
STATE_FACTOR = 2.0
KERNELS = 12
STEP_LIMITS = {15: 1.10, 31: 1.15}

Runs = dict[tuple[str, str], Record]


@dataclass(frozen=True)
class Comparison:
    """Two runs' outputs: `engine` and `step` against those of `reference`."""

    engine: str
    step: str
    reference: str
    found: list[Difference]
    prompts: int
    setting: Mapping[str, Any]


def runs(records: Iterable[Record], digest: str) -> Runs:
    """The records of this patch set that the catalogue still has, by engine and step."""
    keys = {
        catalog.result_key(engine, step, digest): (engine.name, step["name"]) for engine, step in catalog.every_step()
    }
    return {keys[record["key"]]: record for record in records if record["key"] in keys}


def answers(records: Iterable[Record]) -> dict[str, list[list[float]]]:
    """What the engine without speculation said about sequences, from all runs of it."""
    found: dict[str, list[list[float]]] = {}
    for record in records:
        if record["step"]["kind"] == "gaps":
            found.update(record["result"]["answers"])
    return found


def comparisons(known: Runs) -> Iterator[Comparison]:
    """Every pair of runs that ought to agree and that there are results of."""
    for (engine, name), record in known.items():
        result, step = record["result"], record["step"]
        if step["kind"] in ("generate", "mixed", "oracle"):
            target = catalog.ENGINES[engine].target
            prompts = _prompts(known, target)
            if prompts is None:
                continue
            for reference, other in _references(known, engine, step):
                found = differences(prompts, result["outs"], other["result"]["outs"], target)
                yield Comparison(engine, name, reference, found, len(prompts), step)
        elif step["kind"] == "turns":
            found = differences(result["prompts"], result["hot"]["outs"], result["cold"]["outs"])
            yield Comparison(engine, name, "cold", found, len(result["prompts"]), step)


def _prompts(known: Runs, target: str) -> list[list[int]] | None:
    record = known.get((catalog.PLAIN_OF[target], catalog.PROMPTS_STEP))
    return record["result"]["prompts"] if record else None


def _references(known: Runs, engine: str, step: catalog.Step) -> Iterator[tuple[str, Record]]:
    target = catalog.ENGINES[engine].target
    plain, chain = catalog.PLAIN_OF[target], catalog.CHAIN_OF[target]
    if engine == plain:
        return
    arrival = step["arrival"]
    wanted = [(plain, catalog.generation(None, arrival))]
    if engine != chain and not step.get("leak"):
        wanted.append((chain, catalog.generation(step["drafter"], arrival, eager=step["eager"])))
    for reference, other in wanted:
        record = known.get((reference, other["name"]))
        if record:
            yield reference, record


def _trees() -> list[str]:
    return [spec.name for spec in catalog.ENGINES.values() if spec.budget]


# -- parts of the report -----------------------------------------------------------------------------


class Builder:
    """Collects figures and checks."""

    def __init__(self, records: Iterable[Record], digest: str) -> None:
        everything = list(records)
        self.runs = runs(everything, digest)
        self.answers = answers(everything)
        self.comparisons = list(comparisons(self.runs))
        self.checks: list[dict[str, Any]] = []
        self.expected: dict[str, dict[str, float]] = json.loads(EXPECTED.read_text())

    def check(self, name: str, passed: bool, detail: str, *, aim: bool = False) -> None:
        """Note whether something was shown. An aim that is missed does not fail the report."""
        self.checks.append({"name": name, "passed": bool(passed), "aim": aim, "detail": detail})

    def of_kind(self, kind: str) -> Iterator[tuple[str, str, Record]]:
        for (engine, name), record in self.runs.items():
            if record["step"]["kind"] == kind:
                yield engine, name, record

    # -- outputs -------------------------------------------------------------------------------------

    def exactness(self) -> dict[str, Any]:
        """Every first difference at a near-tie, and few of them; not so where state leaks on purpose."""
        figures: dict[str, Any] = {}
        own = {
            (comparison.engine, comparison.step): len(comparison.found)
            for comparison in self.comparisons
            if comparison.engine in catalog.CHAIN_OF.values() and comparison.reference in catalog.PLAIN_OF.values()
        }
        broken: list[str] = []
        many: list[str] = []
        swept: list[str] = []
        matrix = {
            (job.engine.name, step["name"])
            for job in catalog.jobs(["exact", "window64", "attention", "no-graphs"])
            for step in job.steps
        }
        unknown = 0
        leaks: dict[str, int] = {}
        for comparison in self.comparisons:
            label = f"{comparison.engine} {comparison.step} / {comparison.reference}"
            figures[label] = verdict(comparison.found, self.answers)
            if comparison.setting.get("leak"):
                leaks[f"{comparison.engine} {comparison.step}"] = len(figures[label]["broken"])
                continue
            if comparison.setting["kind"] == "turns":
                continue
            unknown += figures[label]["unknown"]
            if figures[label]["broken"]:
                broken.append(label)
            step = comparison.setting
            chain = (
                catalog.CHAIN_OF[catalog.ENGINES[comparison.engine].target],
                catalog.generation(step["drafter"], step["arrival"], eager=step["eager"])["name"],
            )
            if comparison.engine != chain[0] and chain in own and len(comparison.found) > own[chain] + MORE_THAN_CHAIN:
                where = many if (comparison.engine, comparison.step) in matrix else swept
                where.append(f"{label}: {len(comparison.found)} > {own[chain]} + {MORE_THAN_CHAIN}")
        trees = sum(name.partition(" ")[0] in _trees() and " / " in name for name in figures)
        if not trees:
            return figures
        self.check(
            "near-ties",
            not broken and not unknown,
            f"{trees} comparisons of trees; first differences further apart than {NEAR_TIE} nats: {broken or 'none'}"
            + (f"; not looked up: {unknown}" if unknown else ""),
        )
        self.check(
            "differences",
            not many,
            f"more than the chain's own + {MORE_THAN_CHAIN}: {many or 'none'}; "
            f"in the sweeps of top-k and spine: {swept or 'none'}",
        )
        if leaks:
            seen = max(leaks.values())
            self.check("leak is seen", seen >= LEAK_PROMPTS, f"prompts that break the rule, states leaked: {leaks}")
        return figures

    def shadow(self) -> dict[str, Any]:
        """Served as by DFLASH, one request at a time."""
        figures = {}
        for engine, name, record in self.of_kind("generate"):
            chain = self.runs.get(("chain", name))
            if engine == "shadow31" and chain:
                same = sum(
                    one == other for one, other in zip(record["result"]["outs"], chain["result"]["outs"], strict=True)
                )
                figures[name] = same
                if record["step"]["arrival"] == 1:
                    self.check(f"shadow {name}", same == catalog.PROMPTS, f"{same} of {catalog.PROMPTS} as DFLASH's")
        return figures

    def turns(self) -> dict[str, Any]:
        """The second turn from the prefix cache and without it."""
        figures = {}
        for comparison in self.comparisons:
            if comparison.setting["kind"] != "turns":
                continue
            result = self.runs[comparison.engine, comparison.step]["result"]
            figure = verdict(comparison.found, self.answers)
            beyond = sum(
                cached > len(prompt) for cached, prompt in zip(result["cached"], result["first_prompts"], strict=True)
            )
            figures[comparison.engine] = {**figure, "hits_beyond_the_prompt": beyond, "prompts": comparison.prompts}
            if comparison.engine == "radix15":
                self.check(
                    "prefix cache",
                    beyond == comparison.prompts and not figure["broken"] and not figure["unknown"],
                    f"{beyond} of {comparison.prompts} second turns hit generated tokens; "
                    f"{figure['differ']} differ from the cold turn, {len(figure['broken'])} beyond a near-tie",
                )
        return figures

    def stops(self) -> dict[str, Any]:
        """Outputs end with their stop token, wherever in a path it came."""
        figures = {}
        for engine, _, record in self.of_kind("stops"):
            result = record["result"]
            right = sum(
                cut == full[: full.index(stop) + 1]
                for full, stop, cut in zip(result["full"], result["stops"], result["cut"], strict=True)
            )
            figures[engine] = right
            self.check(
                f"stop tokens {engine}", right == len(result["cut"]), f"{right} of {len(result['cut'])} cut there"
            )
        return figures

    def sampling(self) -> dict[str, Any]:
        """Token frequencies at temperature 1 as without speculation; another temperature's are not."""
        samples = {(engine, name): record["result"]["counts"] for engine, name, record in self.of_kind("sample")}
        plain = samples.get(("plain", f"sample/none/{1.0}"))
        figures: dict[str, Any] = {}
        if plain is None:
            return figures
        for (engine, name), counts in samples.items():
            if (engine, name) == ("plain", f"sample/none/{1.0}"):
                continue
            parts = {}
            for label, positions in (("2", range(1, 2)), ("3", range(2, 3)), ("2-3", range(1, 3))):
                statistic, freedom, p_value = chi_square(marginal(plain, positions), marginal(counts, positions))
                parts[label] = {"chi2": round(statistic, 2), "freedom": freedom, "p": round(p_value, 5)}
            figures[f"{engine} {name}"] = parts
            lowest = min(part["p"] for part in parts.values())
            if engine == "plain":
                self.check("sampling test can fail", lowest < P_VALUE, f"{name} against temperature 1: p {lowest}")
            else:
                self.check(f"sampling {engine}", lowest >= P_VALUE, f"lowest p of tokens 2, 3 and both: {lowest}")
        for engine, _, record in self.of_kind("mixed"):
            result = record["result"]
            other = sum(one != greedy for one, greedy in zip(result["sampled"], result["outs"], strict=True))
            figures[f"{engine} mixed"] = {"sampled_unlike_greedy": other}
            self.check(
                f"sampled is sampled {engine}",
                other == len(result["outs"]),
                f"{other} of {len(result['outs'])} not the argmax's",
            )
        return figures

    # -- states and pools ----------------------------------------------------------------------------

    def states(self) -> dict[str, Any]:
        """After a round the pools hold the committed prefix's states, as near as the chain's rounds leave them."""
        figures = {}
        for engine, name, record in self.of_kind("state"):
            states = record["result"]["states"]
            figures[f"{engine} {name}"] = {
                key: round(max(state[key] for state in states), 5) for key in ("ssm", "conv")
            } | {key: round(min(state[key] for state in states), 5) for key in ("one_off_ssm", "one_off_conv")}
        chains = {label.partition(" ")[0]: figure for label, figure in figures.items() if "chain " in label}
        for label, figure in figures.items():
            engine = label.partition(" ")[0]
            # States in bfloat16 are as far off as a chain's that are.
            chain = chains.get("bf16-chain" if engine.startswith("bf16-") else "chain")
            if chain is None or engine in chains:
                continue
            near = all(figure[key] <= STATE_FACTOR * chain[key] for key in ("ssm", "conv"))
            if "leak" in label:
                self.check(f"state test can fail: {label}", not near, f"{figure}, chain {chain}")
            else:
                self.check(f"state {label}", near, f"{figure}, chain {chain}")
        return figures

    def pools(self) -> dict[str, Any]:
        """Nothing is kept once the last request is gone."""
        figures: dict[str, Any] = {}
        left = []
        for engine, name, record in self.of_kind("generate"):
            before, after = record["result"]["pools"]
            figures.setdefault(engine, before)
            if before != after or before != figures[engine]:
                left.append(f"{engine} {name}: {before} -> {after}")
        if figures:
            self.check("pools", not left, f"{len(figures)} engines; not as before: {left or 'none'}")
        return figures

    def waits(self) -> dict[str, Any]:
        """One wait for the device a round."""
        figures = {}
        for engine, _, record in self.of_kind("sync"):
            figures[engine] = record["result"]
            if "error" in record["result"]:
                result = record["result"]["error"]
                self.check(
                    f"no wait but the read-back {engine}",
                    result["rounds"] > 0 and not result["waits"] and result["fused"],
                    f"{result['rounds']} rounds under sync debug mode error, the read-back exempt",
                )
        return figures

    # -- gain and time -------------------------------------------------------------------------------

    def gain(self) -> dict[str, Any]:
        """Accept lengths, and the trees' over the chain's against the expectation worked out without an engine."""
        figures: dict[str, Any] = {}
        lengths = {}
        for engine, name, record in self.of_kind("generate"):
            step, result = record["step"], record["result"]
            if (
                engine == "shadow31"
                or not sum(result["verifies"])
                or step["eager"]
                or step["arrival"] not in (1, 8)
                or step.get("leak")
            ):
                continue
            tokens = sum(len(output) - 1 for output in result["outs"])
            lengths[engine, name] = tokens / sum(result["verifies"])
        for (engine, name), length in lengths.items():
            record = self.runs[engine, name]
            step = record["step"]
            target = catalog.ENGINES[engine].target
            chain = lengths.get(
                (catalog.CHAIN_OF[target], catalog.generation(step["drafter"], step["arrival"])["name"])
            )
            figure: dict[str, Any] = {"accept_length": round(length, 3)}
            figure["engine_accept_length"] = round(
                sum(len(output) for output in record["result"]["outs"]) / sum(record["result"]["verifies"]), 3
            )
            budget = catalog.ENGINES[engine].budget
            if chain and budget:
                label = f"budget {budget}{' spine' if step.get('spine') else ''} topk {step.get('topk') or 8}"
                figure["over_chain"] = round(length / chain, 4)
                table = self.expected[step["drafter"]]
                if label in table and target == "target":
                    figure["expected_over_chain"] = round(table[label] / table["chain"], 4)
                    off = figure["over_chain"] / figure["expected_over_chain"] - 1
                    figure["off"] = round(off, 4)
                    if not step.get("topk"):
                        self.check(
                            f"gain {engine} {name}",
                            abs(off) <= GAIN_TOLERANCE,
                            f"{figure['over_chain']}, off by {off:+.1%}",
                        )
            figures[f"{engine} {name}"] = figure
        for engine, name, record in self.of_kind("oracle"):
            passes = [
                round(sum(len(output) - 1 for output in run["outs"]) / sum(run["verifies"]), 3)
                for run in record["result"]["passes"]
            ]
            figures[f"{engine} {name}"] = {"accept_length_by_pass": passes}
            self.check(f"long paths {engine} {name}", passes[-1] > 1.5 * passes[0], f"accept length {passes}")
        return figures

    def steps(self) -> dict[str, Any]:
        """Rounds of full batches: their period, the trees' over the chain's, and their parts."""
        figures: dict[str, Any] = {}
        for engine, name, record in self.of_kind("clock"):
            figures.setdefault(name, {})[engine] = round(_period(record["result"]), 3)
        for name, periods in figures.items():
            for engine in list(periods):
                spec = catalog.ENGINES[engine]
                chain = periods.get(f"{engine.partition('-')[0]}-chain")
                if spec.budget and chain:
                    periods[f"{engine} over chain"] = ratio = round(periods[engine] / chain, 3)
                    if spec.budget in STEP_LIMITS:
                        limit = STEP_LIMITS[spec.budget]
                        self.check(f"step time {engine} {name}", ratio <= limit, f"{ratio}, aim {limit}", aim=True)
        parts = {f"{engine} {name}": _parts(record["result"]) for engine, name, record in self.of_kind("breakdown")}
        memory = {engine: record["result"]["memory"] for engine, _, record in self.of_kind("clock")}
        kernels = {f"{engine} {name}": _top(record["result"]) for engine, name, record in self.of_kind("kernels")}
        return {"round_ms": figures, "parts_ms": parts, "kernels_ms": kernels, "verify_states": memory}


def _period(result: Mapping[str, Any]) -> float:
    """Milliseconds from the start of a full batch's round to the next one's, the median."""
    return 1000 * median(
        after[1] - before[1]
        for part in result["parts"]
        for before, after in itertools.pairwise(part)
        if before[0] == after[0] == result["batch"]
    )


def _parts(result: Mapping[str, Any]) -> dict[str, list[float]]:
    """Label -> median milliseconds per full batch's round, on the device and on the host."""
    sums: dict[str, dict[int, list[float]]] = {}
    for number, size, label, device, host in result["spans"]:
        if size == result["batch"]:
            total = sums.setdefault(label, {}).setdefault(number, [0.0, 0.0])
            total[0] += device
            total[1] += host
    return {
        label: [round(median(spent[side] for spent in rounds.values()), 3) for side in (0, 1)]
        for label, rounds in sums.items()
    }


def _top(result: Mapping[str, Any]) -> dict[str, list[float]]:
    """The kernels that take most of a round: milliseconds and launches."""
    longest = sorted(result["kernels"].items(), key=lambda item: -item[1][0])[:KERNELS]
    return {name[:100]: [round(value, 3) for value in values] for name, values in longest}


def build(records: Iterable[Record], digest: str) -> dict[str, Any]:
    """The report on all records of this patch set: `passed` only if every check of what was run is, aims aside."""
    builder = Builder(records, digest)
    parts = {
        name: getattr(builder, name)()
        for name in ("exactness", "shadow", "turns", "stops", "sampling", "states", "pools", "waits", "gain", "steps")
    }
    missing = [
        f"{engine.name} {step['name']}"
        for engine, step in catalog.every_step()
        if (engine.name, step["name"]) not in builder.runs and step["kind"] != "gaps"
    ]
    return {
        "engine": "0.5.11",
        "set_digest": digest,
        "near_tie_nats": NEAR_TIE,
        "large_target_parameters": models.parameters(),
        "passed": bool(builder.checks) and all(check["passed"] or check["aim"] for check in builder.checks),
        "checks": builder.checks,
        "not_run": missing,
        **parts,
    }


def summary(written: Mapping[str, Any]) -> str:
    """The checks as lines of text."""
    words = {(True, False): "ok  ", (True, True): "ok  ", (False, True): "MISS", (False, False): "FAIL"}
    lines = [
        f"{words[check['passed'], check['aim']]} {check['name']}: {check['detail']}" for check in written["checks"]
    ]
    return "\n".join([*lines, f"not run: {len(written['not_run'])} steps"])
