"""From a target to an open way to it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ddtree_deploy.hosts.target import Target
from ddtree_deploy.hosts.transport import Transport
from ddtree_deploy.hosts.watch import SILENT, Watch


def connect(target: Target, *, accept_new: bool = False, watch: Watch = SILENT) -> Transport:
    """Open the way to ``target``; close it after use.

    ``accept_new`` is for ssh: the key of a host that has none in known_hosts is added there, a changed key never.
    ``watch`` hears of an added key, and of every step. Raises DeployError DD301 to DD305, each one line.
    """
    machine = _machine(target, accept_new, watch)
    if target.container:
        from ddtree_deploy.hosts.container import ContainerTransport

        return ContainerTransport(target, machine)
    return machine


def _machine(target: Target, accept_new: bool, watch: Watch) -> Transport:
    if target.kind == "local":
        from ddtree_deploy.hosts.local import LocalTransport

        return LocalTransport()
    if target.transport == "openssh":
        from ddtree_deploy.hosts.openssh import open_openssh

        return open_openssh(target, accept_new=accept_new, watch=watch)
    with _without_invoke():
        from ddtree_deploy.hosts.ssh import open_ssh
    return open_ssh(target, accept_new=accept_new, watch=watch)


@contextlib.contextmanager
def _without_invoke() -> Iterator[None]:
    """Keep paramiko from loading the package ``invoke``: a third of its start, for one kind of ssh configuration.

    It does without where it is not installed; our reader of configurations (sshconfig) brings it where it is needed.
    """
    if "paramiko" in sys.modules or "invoke" in sys.modules:
        yield
        return
    sys.modules["invoke"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["invoke"]
