"""One booted machine for all tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.machine import Machine, why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.systemd)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with systemd and sshd, the stand-in engine in /opt/engine. Tests use services of their own names."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    booted = Machine(tmp_path_factory.mktemp("machine"))
    yield booted
    booted.stop()


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own ssh-agent has no part in a test."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
