"""Bounded looks at a host: files, folders and short commands. What fails is an answer, never an exception."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import selectors
import signal
import subprocess
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

MAX_TEXT = 256 * 1024
MAX_OUTPUT = 1024 * 1024
# A flag whose value is a secret, abbreviated or not: by its words.
_SECRET_FLAG = re.compile(r"^--(?:[a-z]+-)*(?:api(?:-k|-ke|-key)?|token|password|passwd|secret)(?==|$)")
_KILL_GRACE_S = 1.0

Fact = Dict[str, Any]


def read(path: str, limit: int = MAX_TEXT) -> Optional[str]:
    """The first ``limit`` bytes of a file as text, None where it cannot be read."""
    try:
        with open(path, "rb") as handle:
            return handle.read(limit).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def listing(folder: str) -> List[str]:
    """The names in a folder, sorted; none where it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []


def find_program(name: str, path: Optional[str] = None) -> Optional[str]:
    """Where a program is: on ``path`` or $PATH, then in the system's own folders."""
    import shutil

    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return shutil.which(name, path=(path or os.environ.get("PATH", "")) + os.pathsep + system)


def run(argv: Sequence[str], seconds: float, env: Optional[Dict[str, str]] = None, limit: int = MAX_OUTPUT) -> Fact:
    """Run a command for at most ``seconds``, keeping at most ``limit`` bytes of each stream.

    ``{"status", "out", "err", "error"}``: ``error`` says why there is no whole answer (not found, ran too
    long, said too much), else None. Its whole session is killed at the end.
    """
    answer: Fact = {"status": None, "out": "", "err": "", "error": None}
    environment = dict(os.environ if env is None else env, LC_ALL="C")
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        answer["error"] = "%s: %s" % (argv[0], getattr(error, "strerror", None) or error)
        return answer
    kept = {"out": b"", "err": b""}
    deadline = time.monotonic() + seconds
    try:
        with selectors.DefaultSelector() as selector:
            for name, stream in (("out", process.stdout), ("err", process.stderr)):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, name)
            while selector.get_map() and answer["error"] is None:
                left = deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    answer["error"] = "no answer within %g s" % seconds
                for key, _events in ready:
                    piece = os.read(key.fd, 65536)
                    if not piece:
                        selector.unregister(key.fileobj)
                    kept[key.data] += piece
                    if len(kept[key.data]) > limit:
                        answer["error"] = "more than %d bytes" % limit
        if answer["error"] is None:
            answer["status"] = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        answer["error"] = "no end within %g s" % seconds
    finally:
        _end(process)
    for name, data in kept.items():
        answer[name] = data[:limit].decode("utf-8", "replace")
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process stuck inside a driver cannot be killed: it is left to the system.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_GRACE_S)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def together(actions: Dict[str, Any], seconds: float, done: Optional[Callable[[str], None]] = None) -> Dict[str, Any]:
    """Call every ``actions[name]()`` at once; name -> what it returned.

    One that raises, or has not returned after ``seconds`` (a file system that hangs cannot be waited for), gives
    ``{"error": why}``. ``done(name)`` is called in this thread as they end.
    """
    answers: Dict[str, Any] = {}
    ended: queue.Queue[Tuple[str, Any]] = queue.Queue()

    def work(name: str, action: Any) -> None:
        try:
            ended.put((name, action()))
        except Exception as error:  # noqa: BLE001 - a failed look is a fact
            ended.put((name, {"error": "%s: %s" % (type(error).__name__, error)}))

    for name, action in actions.items():
        threading.Thread(target=work, args=(name, action), daemon=True).start()
    deadline = time.monotonic() + seconds
    while len(answers) < len(actions):
        try:
            name, answer = ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        answers[name] = answer
        if done:
            done(name)
    late = {"error": "no answer within %g s" % seconds}
    return {name: answers.get(name, late) for name in actions}


def mask(argv: Sequence[str]) -> List[str]:
    """``argv`` without the values of flags that carry secrets."""
    shown: List[str] = []
    hide = False
    for word in argv:
        match = _SECRET_FLAG.match(word)
        if hide and not word.startswith("--"):
            shown.append("***")
        elif match and "=" in word:
            shown.append(match.group() + "=***")
        else:
            shown.append(word)
        hide = bool(match) and "=" not in word
    return shown


def command_of(pid: int) -> Optional[List[str]]:
    """The masked argument vector of a process, None where there is none to be read."""
    text = read("/proc/%d/cmdline" % pid, 65536)
    if not text:
        return None
    return mask(text.rstrip("\0").split("\0"))


def number(text: Optional[str]) -> Optional[float]:
    """The first number in a text, None without one."""
    match = re.search(r"-?\d+(?:\.\d+)?", text or "")
    return float(match.group()) if match else None


def version_in(text: str, pattern: str) -> Optional[str]:
    """The first group of ``pattern`` in ``text``."""
    match = re.search(pattern, text)
    return match.group(1) if match else None
