"""Which parts of the machine the tests found absent, and that CI skips nothing which the README does not list."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

README = Path(__file__).parent / "README.md"
# The README lists what CI may skip, one reason a line, between these two comments.
_LISTED = re.compile(r"<!-- allowed skips -->(.*?)<!-- /allowed skips -->", re.DOTALL)
_PARTS = {
    "sshd": lambda: shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"),
    "systemd": lambda: shutil.which("systemd-analyze"),
    "git": lambda: shutil.which("git"),
}


def allowed_skips() -> list[str]:
    """The skip reasons that the README lists: ``- `reason` ...``."""
    text = README.read_text() if README.exists() else ""
    return [reason for block in _LISTED.findall(text) for reason in re.findall(r"^- `([^`]+)`", block, re.MULTILINE)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    absent = [name for name, find in _PARTS.items() if not find()]
    if absent:
        terminalreporter.write_line(f"absent on this machine, and so not tested: {', '.join(absent)}")
    for reason in sorted({_reason(report) for report in terminalreporter.stats.get("skipped", [])}):
        terminalreporter.write_line(f"skipped: {reason}")


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("DDTREE_DEPLOY_STRICT_SKIPS") or reporter is None or hasattr(session.config, "workerinput"):
        return
    listed = allowed_skips()
    extra = {_reason(report) for report in reporter.stats.get("skipped", []) if _reason(report) not in listed}
    if extra:
        reporter.write_line("")
        for reason in sorted(extra):
            reporter.write_line(f"not allowed to be skipped (README, allowed skips): {reason}", red=True)
        if exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
