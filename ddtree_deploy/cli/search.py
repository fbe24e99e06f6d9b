"""Where grep and find-def look: a host, or a stored snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.cli import options as opt
from ddtree_deploy.errors import DeployError

if TYPE_CHECKING:
    from ddtree_deploy.console import Console
    from ddtree_deploy.hosts.session import HostSession
    from ddtree_deploy.snapshots.store import Snapshot

SnapshotOption = Annotated[
    str | None,
    typer.Option("--snapshot", "-s", metavar="SNAPSHOT", help="A stored snapshot: id, host, prefix or `latest`."),
]
IncludeOption = Annotated[list[str] | None, typer.Option("--include", metavar="GLOB", help="Only such paths.")]
ExcludeOption = Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="No such paths.")]
UnderOption = Annotated[
    str | None, typer.Option("--under", metavar="PATH", help="Only below this folder, such as srt/speculative.")
]


@contextmanager
def place(choice: opt.HostChoice, snapshot: str | None, console: Console) -> Iterator[HostSession | Snapshot]:
    """The session or the snapshot to search: what was named, else the default host, else the newest snapshot."""
    if snapshot is not None:
        from ddtree_deploy.snapshots.store import Store

        yield Store.default().find(snapshot, choice.host)
        return
    if choice.host is None:
        inventory = opt.load(choice)
        if inventory.shipped or inventory.default_host is None:
            from ddtree_deploy.snapshots.store import Store

            every = Store.default().snapshots()
            if not every:
                raise DeployError(
                    "DD002",
                    "no host named, no default host, and no snapshot taken yet",
                    "give --host HOST, or take one: ddtree-deploy snapshot HOST",
                )
            console.note(f"searching snapshot {every[-1].id}")
            yield every[-1]
            return
    with opt.open_session(choice, console) as session:
        yield session
