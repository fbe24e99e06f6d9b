"""File systems and system calls that misbehave, under a tree that the agent works on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: Runs as the host's python: the loader with some of the operating system's answers changed.
BROKEN = """\
#!{python}
import errno, fcntl, os, sys, time
flag = {flag!r}
real = dict(open=os.open, write=os.write, mkdir=os.mkdir, replace=os.replace, unlink=os.unlink, flock=fcntl.flock)
def say(kind, path):
    raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)), path)
def now():
    try:
        return open(flag).read()
    except OSError:
        return ""
def changing(name):
    def call(path, *args, **keywords):
        if now() == "EROFS":
            say("EROFS", path)
        return real[name](path, *args, **keywords)
    return call
def opening(path, flags, *args, **keywords):
    if now() == "EROFS" and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        say("EROFS", path)
    return real["open"](path, flags, *args, **keywords)
def writing(fd, data):
    if now() == "ENOSPC" and fd > 2:
        say("ENOSPC", None)
    return real["write"](fd, data)
def locking(fd, kind):
    if now() == "ENOLCK":
        say("ENOLCK", None)
    return real["flock"](fd, kind)
os.open, os.write, fcntl.flock = opening, writing, locking
os.mkdir, os.replace, os.unlink = changing("mkdir"), changing("replace"), changing("unlink")
if now().startswith("clock "):
    off = float(now().split()[1])
    time_of, gm = time.time, time.gmtime
    time.time = lambda: time_of() + off
    time.gmtime = lambda seconds=None: gm(time_of() + off if seconds is None else seconds)
exec(sys.argv[sys.argv.index("-c") + 1], {{"__name__": "__main__"}})
"""


class Disk:
    """A small file system of its own where one may be mounted, else an interpreter that speaks for one.

    ``folder`` is on it; ``python`` is the interpreter to name. After :meth:`fill` and :meth:`freeze` nothing
    can be written to it, until :meth:`mend`.
    """

    def __init__(self, folder: Path, *, mounted: bool) -> None:
        self.folder = folder / "disk"
        self.folder.mkdir()
        self._flag = folder / "flag"
        self.mounted = mounted and self._mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
        self.python = sys.executable
        if not self.mounted:
            self.python = str(folder / "broken-python")
            Path(self.python).write_text(BROKEN.format(python=sys.executable, flag=str(self._flag)))
            Path(self.python).chmod(0o755)

    def _mount(self, *arguments: str) -> bool:
        try:
            return not subprocess.run(["mount", *arguments, str(self.folder)], capture_output=True).returncode
        except OSError:
            return False

    def answer(self, what: str) -> None:
        """Let the stand-in give this answer: an error's name, or "clock SECONDS"."""
        self._flag.write_text(what)

    def fill(self) -> None:
        if not self.mounted:
            return self.answer("ENOSPC")
        with (self.folder / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(b"x" * 4096)
            except OSError:
                os.fsync(ballast.fileno())
        return None

    def freeze(self) -> None:
        if self.mounted:
            assert self._mount("-o", "remount,ro")
        else:
            self.answer("EROFS")

    def mend(self) -> None:
        if self.mounted:
            assert self._mount("-o", "remount,rw")
            (self.folder / "ballast").unlink(missing_ok=True)
        else:
            self._flag.unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)
