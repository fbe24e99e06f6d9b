"""Login shells for sshd: those that the machine has, and one that takes only what all of them take alike."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

#: Words in single quotes or of plain characters, one space between them: what sh, csh and fish read the same way.
PLAIN = """\
#!{python}
import os, re, sys
line = sys.argv[sys.argv.index("-c") + 1]
word = r"(?:[A-Za-z0-9_@%+=:,./-]+|'[^'\\\\!\\n]*')"
if not re.fullmatch(rf"{{word}}(?: {{word}})*", line):
    sys.exit("plain: syntax error: " + line)
words = [each.strip("'") for each in re.findall(word, line)]
try:
    os.execvp(words[0], words)
except OSError as error:
    sys.stderr.write(f"{{words[0]}}: Command not found.\\n")
    sys.exit(1)
"""


def plain_shell(folder: Path) -> Path:
    """The strict stand-in, as a program."""
    path = folder / "plain"
    path.write_text(PLAIN.format(python=sys.executable))
    path.chmod(0o755)
    return path


def installed() -> list[str]:
    """The login shells of this machine, besides the stand-in."""
    return [name for name in ("sh", "bash", "zsh", "ksh", "fish", "tcsh") if shutil.which(name)]


def as_login_shell(folder: Path, shell: str) -> str:
    """A ForceCommand under which sshd runs a client's command as it would with ``shell`` as the login shell."""
    path = folder / f"as-{Path(shell).name}"
    path.write_text(f'#!/bin/sh\nexec {shell} -c "$SSH_ORIGINAL_COMMAND"\n')
    path.chmod(0o755)
    return str(path)
