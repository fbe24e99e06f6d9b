"""One command on many hosts at once: what each of them says, then one table and the worst exit status."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_deploy.cli.guard import guarded
from ddtree_deploy.console import Console
from ddtree_deploy.errors import DeployError, ExitStatus

#: Hosts at work at once where ``--serial`` does not say.
PARALLEL = 16
NOT_TRIED = "not tried"
_SECONDS = 0.2  # how often Ctrl-C is looked for

_VERDICTS = {
    ExitStatus.OK: "ok",
    ExitStatus.FINDINGS: "findings",
    ExitStatus.USAGE: "usage",
    ExitStatus.REFUSED: "refused",
    ExitStatus.CONNECTION: "no connection",
    ExitStatus.LOCKED: "locked",
    ExitStatus.ROLLED_BACK: "undone",
    ExitStatus.ROLLBACK_INCOMPLETE: "needs a person",
    ExitStatus.INTERNAL: "fault",
    ExitStatus.INTERRUPTED: "interrupted",
}

_HostsOption = Annotated[
    list[str] | None, typer.Option("--host", metavar="HOST", help="The host, as an option; given again, all of them.")
]
_LabelOption = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="All hosts of the inventory with this label; of several, all."),
]
_SerialOption = Annotated[
    int | None,
    typer.Option("--serial", metavar="N", min=1, help="N hosts at a time; the next ones when these went well."),
]
_MaxFailOption = Annotated[
    int | None,
    typer.Option("--max-fail", metavar="N", min=0, help="Begin with no further host once more than N have failed."),
]


@dataclasses.dataclass
class Verdict:
    """What became of one host. ``status`` is its exit status, None where it was not tried."""

    host: str
    status: int | None = None
    seconds: float = 0.0
    said: str = ""

    @property
    def word(self) -> str:
        """The status in a word."""
        return NOT_TRIED if self.status is None else _VERDICTS[ExitStatus(self.status)]

    @property
    def failed(self) -> bool:
        """Whether it counts for ``--max-fail``: findings do not."""
        return self.status is not None and self.status > ExitStatus.FINDINGS


def over_hosts(command: Callable[..., Any], *, changes: bool) -> Callable[..., int | None]:
    """``command`` for several hosts: by repeated ``--host``, by ``--label``; with ``--serial`` and ``--max-fail``.

    With one host it is ``command`` itself. With more, each host gets a console of its own and a thread; ``command``
    is called with one host each time. A command that ``changes`` hosts begins with no further one after a failure
    unless ``--max-fail`` allows it; one that reads goes on.
    """
    signature = inspect.signature(command, eval_str=True)
    name = next(name for name in ("host_option", "host") if name in signature.parameters)

    def run(ctx: typer.Context, **values: Any) -> int | None:
        labels, serial, most = values.pop("label"), values.pop("serial"), values.pop("max_fail")
        hosts = list(dict.fromkeys(values[name] or ()))
        if len(hosts) < 2 and not labels:
            values[name] = hosts[0] if hosts else None
            result: int | None = command(ctx, **values)
            return result
        if name != "host" and values.get("host"):
            raise DeployError(
                "DD001", f"the host {values['host']} is named beside --host or --label", "name all by --host"
            )
        hosts = list(dict.fromkeys([*hosts, *_labelled(labels or (), values["inventory"])]))
        limit = most if most is not None else 0 if changes else len(hosts)

        def one(host: str, console: Console) -> int:
            context = type(ctx)(ctx.command, parent=ctx.parent, info_name=ctx.info_name, obj=console)
            return guarded(console, lambda: command(context, **{**values, name: host}))

        return Fleet(ctx.obj, hosts, serial, limit, bool(values.get("json_mode"))).run(one)

    parameters = [
        parameter.replace(annotation=_HostsOption) if parameter.name == name else parameter
        for parameter in signature.parameters.values()
    ]
    extra = {"label": _LabelOption, "serial": _SerialOption, "max_fail": _MaxFailOption}
    at = next(index for index, parameter in enumerate(parameters) if parameter.name == name) + 1
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters[at:at] = [
        inspect.Parameter(key, keyword, default=None, annotation=annotation) for key, annotation in extra.items()
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _labelled(labels: Sequence[str], inventory: Path | None) -> list[str]:
    """The inventory's hosts that have every label. Raises DeployError DD001, DD002."""
    if not labels:
        return []
    from ddtree_deploy.hosts.inventory import find_inventory

    wanted = []
    for label in labels:
        key, equals, value = label.partition("=")
        if not (key and equals and value):
            raise DeployError("DD001", f"--label {label}: it is KEY=VALUE", "see `ddtree-deploy inventory list`")
        wanted.append((key, value))
    found = find_inventory(str(inventory) if inventory else None)
    hosts = [name for name, target in found.hosts.items() if all(target.labels.get(k) == v for k, v in wanted)]
    if not hosts:
        raise DeployError("DD002", f"no host of {found.path} has {', '.join(labels)}", "`inventory list` shows labels")
    return hosts


class Fleet:
    """The run over ``hosts``; at most ``serial`` at a time (and then in batches), ``max_fail`` failures allowed."""

    def __init__(
        self, console: Console, hosts: Sequence[str], serial: int | None, max_fail: int, json_mode: bool
    ) -> None:
        self.console = console
        self.serial = serial
        self.max_fail = max_fail
        self.json_mode = json_mode
        self.interrupted = False
        self.verdicts = {host: Verdict(host) for host in hosts}

    def run(self, one: Callable[[str, Console], int]) -> int:
        """Run ``one(host, console)`` everywhere; prints all, returns the worst exit status."""
        self.console.json_mode = self.console.compact = self.json_mode
        began = time.monotonic()
        with self.console.progress(f"0 of {len(self.verdicts)} hosts") as progress:
            try:
                for batch in self.batches():
                    self.work(batch, one, progress)
            except KeyboardInterrupt:
                self.interrupted = True
        worst = max((verdict.status or 0 for verdict in self.verdicts.values()), default=0)
        worst = int(ExitStatus.INTERRUPTED) if self.interrupted else worst
        self.console.status = worst
        self.summary(worst, time.monotonic() - began)
        return worst

    def batches(self) -> Iterator[list[str]]:
        """The hosts in lots, as long as no more than ``max_fail`` have failed."""
        hosts = list(self.verdicts)
        size = self.serial or len(hosts)
        for at in range(0, len(hosts), size):
            if self.interrupted or self.failures() > self.max_fail:
                break
            yield hosts[at : at + size]

    def failures(self) -> int:
        return sum(verdict.failed for verdict in self.verdicts.values())

    def work(self, batch: list[str], one: Callable[[str, Console], int], progress: Callable[..., None]) -> None:
        """One lot: threads take hosts until all are done, failures are too many or the user says stop."""
        todo: queue.SimpleQueue[str] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Verdict, str, str]] = queue.SimpleQueue()
        for host in batch:
            todo.put(host)
        stop = threading.Event()

        def worker() -> None:
            while not stop.is_set():
                try:
                    host = todo.get_nowait()
                except queue.Empty:
                    return
                # Set before the host counts as done: nobody may begin with another meanwhile.
                result = self.one_host(host, one)
                if result[0].failed and self.failures() > self.max_fail:
                    stop.set()
                done.put(result)

        threads = [threading.Thread(target=worker, daemon=True) for _ in range(min(PARALLEL, len(batch)))]
        for thread in threads:
            thread.start()
        while True:
            try:
                alive = any(thread.is_alive() for thread in threads)
                try:
                    self.show(*done.get(timeout=_SECONDS if alive else 0), progress)
                except queue.Empty:
                    if not alive:
                        break
            except KeyboardInterrupt:
                if self.interrupted:
                    raise
                self.interrupted = True
                stop.set()
                self.console.note(
                    "interrupted: no further host is begun with; again to leave those at work to themselves"
                )

    def one_host(self, host: str, one: Callable[[str, Console], int]) -> tuple[Verdict, str, str]:
        out, err = io.StringIO(), io.StringIO()
        console = Console(out, err, json_mode=self.json_mode)
        console.verbose = self.console.verbose
        began = time.monotonic()
        status = one(host, console)
        verdict = self.verdicts[host]
        verdict.seconds = round(time.monotonic() - began, 3)
        verdict.said = console.last_error.message if console.last_error else ""
        verdict.status = status
        return verdict, out.getvalue(), err.getvalue()

    def show(self, verdict: Verdict, out: str, err: str, progress: Callable[..., None]) -> None:
        """What one host said, as soon as it has."""
        ended = sum(item.status is not None for item in self.verdicts.values())
        progress(ended, len(self.verdicts), f"{ended} of {len(self.verdicts)} hosts")
        if not self.json_mode:
            self.console.line((f"== {verdict.host}: ", "bold"), _styled(verdict.word))
        for line in err.splitlines():
            self.console.note(f"{verdict.host}: {line}" if line else "")
        if self.json_mode:
            document = json.loads(out) if out else {}
            self.console.data(json.dumps({**document, "host": verdict.host}) + "\n")
        else:
            self.console.data(out)

    def summary(self, worst: int, seconds: float) -> None:
        """One table of all hosts, in the order in which they were named."""
        verdicts = list(self.verdicts.values())
        if self.json_mode:
            hosts = [
                {"host": item.host, "verdict": item.word, "exit_status": item.status, "seconds": item.seconds}
                for item in verdicts
            ]
            document = {"hosts": hosts, "seconds": round(seconds, 3), "exit_status": worst}
            self.console.document("fleet", document)
            return
        rows: list[Sequence[Any]] = [("HOST", "VERDICT", "SECONDS", "")]
        for item in verdicts:
            rows.append((item.host, _styled(item.word), f"{item.seconds:.1f}" if item.seconds else "-", item.said))
        self.console.line("")
        self.console.rows(rows)
        good = sum(item.status == ExitStatus.OK for item in verdicts)
        left = sum(item.status is None for item in verdicts)
        tail = f", {left} not tried" if left else ""
        self.console.line(f"{good} of {len(verdicts)} ok{tail}, {seconds:.1f} s")


def _styled(word: str) -> tuple[str, str]:
    return word, {"ok": "green", NOT_TRIED: "dim", "findings": "yellow"}.get(word, "bold red")
