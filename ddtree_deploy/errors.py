"""Errors a user can cause or must act on: one stable code each, and the exit status it maps to.

A :class:`DeployError` is printed as one line (what, where) and, after it, a ``hint:`` line (what to do next).
Codes never change meaning; a retired code is not reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit statuses of the command line, documented in the README."""

    OK = 0
    FINDINGS = 1
    USAGE = 2
    REFUSED = 3
    CONNECTION = 4
    LOCKED = 5
    ROLLED_BACK = 6
    ROLLBACK_INCOMPLETE = 7
    INTERNAL = 8
    INTERRUPTED = 130


# code -> (title, exit status). 0xx usage and inventory, 1xx patch and host tree, 2xx doctor,
# 3xx connection and agent, 4xx snapshots and wheels, 5xx transactions, 6xx launch, 9xx internal.
CODES: dict[str, tuple[str, ExitStatus]] = {
    # usage and inventory
    "DD001": ("bad command line value", ExitStatus.USAGE),
    "DD002": ("no host named and no default host", ExitStatus.USAGE),
    "DD003": ("inventory not found", ExitStatus.USAGE),
    "DD004": ("inventory is not valid", ExitStatus.USAGE),
    "DD005": ("the shipped example inventory contacts no host", ExitStatus.USAGE),
    "DD006": ("unknown service", ExitStatus.USAGE),
    "DD007": ("a local file or folder could not be used", ExitStatus.USAGE),
    "DD008": ("bad pattern or symbol", ExitStatus.USAGE),
    "DD009": ("git is missing, too old or failed", ExitStatus.USAGE),
    "DD010": ("the patch sets' folder is being written, or a write was interrupted", ExitStatus.REFUSED),
    "DD011": ("this client system is not supported", ExitStatus.USAGE),
    "DD012": ("more than one sglang on the host", ExitStatus.USAGE),
    # patches and the host's tree
    "DD101": ("the host's file is not what the set expects (drift)", ExitStatus.REFUSED),
    "DD102": ("a hunk does not apply", ExitStatus.REFUSED),
    "DD103": ("a hunk matches in more than one place", ExitStatus.REFUSED),
    "DD104": ("the diff is damaged or of an unsupported kind", ExitStatus.REFUSED),
    "DD105": ("unsafe or disallowed path", ExitStatus.REFUSED),
    "DD106": ("file exists or is missing where the diff says otherwise", ExitStatus.REFUSED),
    "DD107": ("patch set not found", ExitStatus.USAGE),
    "DD108": ("patch set is not valid", ExitStatus.USAGE),
    "DD109": ("no family of the patch set serves this engine version", ExitStatus.REFUSED),
    "DD110": ("another applied set builds on this one", ExitStatus.REFUSED),
    "DD111": ("the set is not applied on this host", ExitStatus.REFUSED),
    "DD112": ("the patched file would not compile", ExitStatus.REFUSED),
    "DD113": ("the engine was reinstalled since the set was applied", ExitStatus.REFUSED),
    "DD114": ("another version of the set is applied", ExitStatus.REFUSED),
    "DD115": ("the set cannot go back to that version", ExitStatus.REFUSED),
    "DD116": ("an edit belongs to no patch, or to several", ExitStatus.REFUSED),
    "DD117": ("other patches or sets depend on what is to change", ExitStatus.REFUSED),
    "DD118": ("the scratch tree cannot be used as it is", ExitStatus.REFUSED),
    # connection and agent
    "DD301": ("could not connect", ExitStatus.CONNECTION),
    "DD302": ("unknown host key", ExitStatus.CONNECTION),
    "DD303": ("the host key changed or is revoked", ExitStatus.CONNECTION),
    "DD304": ("authentication failed", ExitStatus.CONNECTION),
    "DD305": ("the ssh configuration could not be used", ExitStatus.CONNECTION),
    "DD306": ("the agent did not answer", ExitStatus.CONNECTION),
    "DD307": ("the agent's reply is damaged", ExitStatus.CONNECTION),
    "DD308": ("the connection was lost", ExitStatus.CONNECTION),
    "DD309": ("the host's python cannot run the agent", ExitStatus.CONNECTION),
    "DD310": ("sudo was refused", ExitStatus.CONNECTION),
    "DD311": ("sglang was not found on the host", ExitStatus.REFUSED),
    "DD312": ("this python is not the engine's own interpreter", ExitStatus.REFUSED),
    "DD313": ("the container cannot be entered", ExitStatus.CONNECTION),
    # snapshots and wheels
    "DD401": ("snapshot not found", ExitStatus.USAGE),
    "DD402": ("a stored snapshot is damaged", ExitStatus.REFUSED),
    "DD403": ("a file changed while it was being read", ExitStatus.REFUSED),
    "DD404": ("the pristine wheel is not available", ExitStatus.REFUSED),
    "DD405": ("the wheel is not the pinned one", ExitStatus.REFUSED),
    "DD406": ("the tree cannot be read", ExitStatus.REFUSED),
    # transactions
    "DD501": ("another deployer holds the lock", ExitStatus.LOCKED),
    "DD502": ("the tree changed between plan and commit", ExitStatus.REFUSED),
    "DD503": ("an earlier transaction was interrupted and waits for recovery", ExitStatus.REFUSED),
    "DD504": ("the host's tree could not be written", ExitStatus.REFUSED),
    "DD505": ("the transaction failed and was undone", ExitStatus.ROLLED_BACK),
    "DD506": ("undoing the transaction failed", ExitStatus.ROLLBACK_INCOMPLETE),
    "DD507": ("engine processes run from this root", ExitStatus.REFUSED),
    "DD508": ("the host's state folder cannot be used", ExitStatus.REFUSED),
    "DD510": ("a transaction stopped half-way and needs a person", ExitStatus.ROLLBACK_INCOMPLETE),
    "DD511": ("interrupted while the host was at work", ExitStatus.INTERRUPTED),
    "DD509": ("a symbolic link is in the way", ExitStatus.REFUSED),
    # launch
    "DD601": ("the service cannot be rendered", ExitStatus.USAGE),
    "DD602": ("not possible on this machine or engine version", ExitStatus.REFUSED),
    "DD603": ("a file where a rendered one goes holds something else", ExitStatus.REFUSED),
    "DD604": ("the host finds fault with the unit or script", ExitStatus.REFUSED),
    "DD605": ("the service could not be started, stopped or asked", ExitStatus.REFUSED),
    "DD606": ("this takes root on the host", ExitStatus.REFUSED),
    "DD607": ("no such install of the service on the host", ExitStatus.REFUSED),
    "DD608": ("the service did not become ready", ExitStatus.FINDINGS),
    "DD609": ("the service answers, but not as it should", ExitStatus.FINDINGS),
    "DD610": ("the engine's parser cannot be read", ExitStatus.REFUSED),
    "DD611": ("a model's config.json cannot be used", ExitStatus.USAGE),
    "DD612": ("something was left unchecked", ExitStatus.REFUSED),
    # internal
    "DD901": ("internal error: what the host did is in its history", ExitStatus.INTERNAL),
    "DD902": ("the output could not be written", ExitStatus.INTERNAL),
}


class DeployError(Exception):
    """A failure with a stable code, one line of message and, where there is one, a next step.

    ``details`` are further lines (one each problem) printed below the message.
    """

    def __init__(self, code: str, message: str, hint: str | None = None, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code if code in CODES else "DD901"
        self.message = message
        self.hint = hint
        self.details = tuple(details)

    @property
    def fields(self) -> dict[str, object]:
        """The error as it stands in a JSON document."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "details": list(self.details),
            "exit_status": int(self.exit_status),
        }

    @property
    def exit_status(self) -> ExitStatus:
        """The exit status that the code maps to."""
        return CODES[self.code][1]
