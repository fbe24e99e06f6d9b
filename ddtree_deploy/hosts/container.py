"""A container as a host: commands go through ``docker exec -i`` (or podman's), here or on a host over ssh."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.target import Target, parse_container
from ddtree_deploy.hosts.transport import RemoteProcess, Transport


class ContainerTransport:
    """Starts commands inside ``target.container``, by way of ``outside``, the machine that runs it.

    With ``target.sudo`` it is the container engine that runs under ``sudo -n``; inside, commands run as the
    image's user. A command that outlives its client sees the end of its input, as over ssh.
    """

    def __init__(self, target: Target, outside: Transport) -> None:
        self._engine, name = parse_container(str(target.container))
        sudo = ("sudo", "-n", "--") if target.sudo else ()
        self._prefix = (*sudo, self._engine, "exec", "-i", name)
        self._outside = outside

    @property
    def user(self) -> str:
        """The account on the machine that runs the container."""
        return self._outside.user

    def start(self, argv: Sequence[str]) -> RemoteProcess:
        """Start ``argv`` in the container. Raises DeployError DD3xx."""
        try:
            return self._outside.start([*self._prefix, *argv])
        except DeployError as error:
            if error.code != "DD309":
                raise
            # It was not the python in the container that is missing here.
            hint = f"install {self._engine}, or name the machine that has it: CONTAINER@HOST"
            raise DeployError("DD313", error.message, hint) from None

    def close(self) -> None:
        """Close the way to the machine. Never raises."""
        self._outside.close()
