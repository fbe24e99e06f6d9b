"""From a target to an open way to it."""

from __future__ import annotations

from ddtree_deploy.hosts.target import Target
from ddtree_deploy.hosts.transport import Transport


def connect(target: Target, *, accept_new: bool = False) -> Transport:
    """Open the way to ``target``; close it after use.

    ``accept_new`` is for ssh: the key of a host that has none in known_hosts is added there, a changed key never.
    Raises DeployError DD301 to DD305, each one line.
    """
    if target.kind == "local":
        from ddtree_deploy.hosts.local import LocalTransport

        return LocalTransport()
    from ddtree_deploy.hosts.ssh import open_ssh

    return open_ssh(target, accept_new=accept_new)
