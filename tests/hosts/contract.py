"""What every transport must do, whatever is below it: the suite runs these against each of them."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_deploy.hosts.transport import RemoteProcess, Transport

PYTHON = sys.executable
BOTH_WAYS = """
import os, sys, threading
def fill(fd, byte):
    left = 3 << 20
    while left:
        left -= os.write(fd, byte * min(left, 65536))
other = threading.Thread(target=fill, args=(2, b"e"))
other.start()
fill(1, b"o")
other.join()
sys.stdout.write(str(len(sys.stdin.buffer.read())))
"""
ECHO = "import os\nwhile piece := os.read(0, 65536):\n    while piece: piece = piece[os.write(1, piece):]"


def alive(pid: int) -> bool:
    """Running, not merely waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def read_all(process: RemoteProcess) -> bytes:
    """Everything on stdout."""
    pieces = []
    while piece := process.read(65536):
        pieces.append(piece)
    return b"".join(pieces)


def check_words(transport: Transport) -> None:
    """Every argument arrives as it was, whatever a shell would make of it."""
    words = ["a b", "", "$HOME", "`id`", "'", '"', "\\", "*", "~", "é", "!", "a\nb", "-n", "#x", "&&"]
    process = transport.start([PYTHON, "-c", "import sys; sys.stdout.write(ascii(sys.argv[1:]))", *words])
    assert read_all(process).decode() == ascii(words)
    assert process.wait() == 0


def check_streams_and_status(transport: Transport) -> None:
    """stdin, stdout, stderr and the exit status, and nothing after the end."""
    process = transport.start(["/bin/sh", "-c", "cat; echo said >&2; exit 7"])
    process.write(b"one")
    process.write(b"two")
    process.close_stdin()
    assert read_all(process) == b"onetwo"
    assert process.read(10) == b""
    assert process.wait() == 7
    assert process.wait() == 7
    assert process.stderr() == "said\n"


def check_small_reads(transport: Transport) -> None:
    """A read never gives more than was asked for."""
    process = transport.start(["printf", "abcdefgh"])
    assert process.read(3) == b"abc"
    assert process.read(4) == b"defg"
    assert process.read(4) == b"h"
    assert process.read(4) == b""
    assert process.wait() == 0


def check_both_ways_at_once(transport: Transport) -> None:
    """3 MiB out on stdout and on stderr before the first byte of 3 MiB of stdin is read."""
    process = transport.start([PYTHON, "-c", BOTH_WAYS])
    process.write(b"i" * (3 << 20))
    process.close_stdin()
    out = read_all(process)
    assert out == b"o" * (3 << 20) + str(3 << 20).encode()
    assert process.wait() == 0
    assert process.stderr() == "e" * 65536


def check_echo(transport: Transport) -> None:
    """A command that answers while it is being written to."""
    data = bytes(range(256)) * (4096 * 3)
    process = transport.start([PYTHON, "-c", ECHO])
    process.write(data)
    process.close_stdin()
    assert hashlib.sha256(read_all(process)).digest() == hashlib.sha256(data).digest()
    assert process.wait() == 0


def check_status_after_unread_output(transport: Transport) -> None:
    """The status of a command whose output nobody read, more than any window holds: no hang."""
    process = transport.start(["/bin/sh", "-c", "head -c 40000000 /dev/zero; exit 3"])
    assert process.wait() == 3


def check_undecodable_stderr(transport: Transport) -> None:
    """stderr is text whatever the bytes."""
    process = transport.start(["/bin/sh", "-c", r"printf 'a\377\033[31mb' >&2"])
    assert process.wait() == 0
    assert process.stderr() == "a\ufffd\x1b[31mb"


def check_a_command_that_does_not_read(transport: Transport) -> None:
    """Writing to a command that is gone ends in BrokenPipeError, and its status is still told."""
    process = transport.start(["/bin/sh", "-c", "echo no >&2; exit 5"])
    with pytest.raises(BrokenPipeError):
        for _ in range(1000):
            process.write(b"x" * 65536)
            time.sleep(0.001)
    assert process.wait() == 5
    assert process.stderr() == "no\n"
    with pytest.raises(BrokenPipeError):
        process.write(b"x")


def check_no_write_after_the_end(transport: Transport) -> None:
    """Nothing can be written behind the end of stdin, although the command runs on."""
    process = transport.start(["sleep", "20"])
    process.close_stdin()
    process.close_stdin()
    refused = threading.Event()

    def write() -> None:
        try:
            process.write(b"x")
        except BrokenPipeError:
            refused.set()

    threading.Thread(target=write, daemon=True).start()
    assert refused.wait(10)
    process.kill()


def check_a_signal(transport: Transport) -> None:
    """A command that a signal ended has a status that is not zero and not None."""
    process = transport.start(["/bin/sh", "-c", "kill -9 $$"])
    assert read_all(process) == b""
    assert process.wait() not in (0, None)


def check_several_at_once(transport: Transport) -> None:
    """Four commands under way on one transport."""
    processes = [transport.start(["/bin/sh", "-c", f"cat; exit {n}"]) for n in range(4)]
    for n, process in reversed(list(enumerate(processes))):
        process.write(b"%d" % n)
        process.close_stdin()
        assert read_all(process) == b"%d" % n
    assert [process.wait() for process in processes] == [0, 1, 2, 3]


def check_kill(transport: Transport) -> None:
    """A dropped command gets a hang-up or the end of its input, and ends."""
    process = transport.start(["/bin/sh", "-c", "echo $$; exec cat"])
    pid = int(process.read(100))
    process.kill()
    process.kill()
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.read(10) == b""
    with pytest.raises(BrokenPipeError):
        process.write(b"x")


def check_a_reader_in_another_thread(transport: Transport) -> None:
    """read() in one thread while write() blocks in another."""
    process = transport.start(["cat"])
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(read_all(process)))
    reader.start()
    for _ in range(40):
        process.write(b"y" * 100_000)
    process.close_stdin()
    reader.join(30)
    assert not reader.is_alive()
    assert len(got[0]) == 4_000_000
    assert process.wait() == 0


CHECKS: list[Callable[[Transport], None]] = [
    check_words,
    check_streams_and_status,
    check_small_reads,
    check_both_ways_at_once,
    check_echo,
    check_status_after_unread_output,
    check_undecodable_stderr,
    check_a_command_that_does_not_read,
    check_no_write_after_the_end,
    check_a_signal,
    check_several_at_once,
    check_kill,
]
