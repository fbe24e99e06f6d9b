from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.connect import connect
from ddtree_deploy.hosts.target import Target
from ddtree_deploy.hosts.transport import Transport
from tests.hosts import contract

HERE = Target("here", "local", root="/")


@pytest.fixture
def local() -> Iterator[Transport]:
    transport = connect(HERE)
    yield transport
    transport.close()


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(local: Transport, check: Callable[[Transport], None]) -> None:
    check(local)


def test_a_command_that_ignores_the_hang_up_may_finish(local: Transport, tmp_path: Path) -> None:
    mark = tmp_path / "done"
    process = local.start(["/bin/sh", "-c", f"trap '' HUP; echo ready; sleep 0.6; touch {mark}"])
    assert process.read(10) == b"ready\n"
    process.kill()
    deadline = time.monotonic() + 10
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_program_that_is_not_there(local: Transport, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    for path, words in ((tmp_path / "absent", "No such file"), (tmp_path / "plain", "Permission denied")):
        with pytest.raises(DeployError, match=words) as caught:
            local.start([str(path), "-V"])
        assert (caught.value.code, caught.value.exit_status) == ("DD309", 4)


def test_ctrl_c_reaches_only_us(local: Transport) -> None:
    process = local.start([sys.executable, "-c", "import os; print(os.getpgid(0), os.getsid(0), os.getpid())"])
    group, session, pid = contract.read_all(process).split()
    assert group == session == pid
    assert int(group) != os.getpgid(0)


def test_nothing_is_left_open(tmp_path: Path) -> None:
    """No leaked descriptor and no warning about one, after commands that ended in every way."""
    code = """
import gc, os, time, warnings
warnings.simplefilter("error")
from ddtree_deploy.hosts.connect import connect
from ddtree_deploy.hosts.target import Target
transport = connect(Target("here", "local"))
before = len(os.listdir("/proc/self/fd"))
for argv in (["true"], ["cat"], ["/bin/sh", "-c", "exit 3"], ["sleep", "30"]):
    process = transport.start(argv)
    if argv != ["sleep", "30"]:
        process.wait()
    process.kill()
del process
gc.collect()
deadline = time.monotonic() + 10
while len(os.listdir("/proc/self/fd")) != before and time.monotonic() < deadline:
    time.sleep(0.02)
assert len(os.listdir("/proc/self/fd")) == before, os.listdir("/proc/self/fd")
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        # Started with `nohup`, the tests would hand on that hang-ups are ignored, and `sleep` would sleep on.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert (done.returncode, done.stderr) == (0, "")
