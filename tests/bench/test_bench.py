"""The benchmark's own parts: what the proxy passes on, and what the table says."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from tests.bench.__main__ import row, table
from tests.bench.delay import delayed
from tests.bench.jobs import Contender, Job


def _echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        received = b""
        while data := connection.recv(1 << 16):
            received += data
        connection.sendall(received)


def test_the_proxy_passes_on_every_byte_and_the_end():
    sent = os.urandom(3_000_000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_echo, args=(server,))
        thread.start()
        with (
            delayed(server.getsockname()[1], 0.02) as port,
            socket.create_connection(("127.0.0.1", port), 10) as client,
        ):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            received = b""
            while data := client.recv(1 << 16):
                received += data
        thread.join(10)
    assert received == sent


def test_a_server_that_is_not_there_ends_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with delayed(port, 0) as proxy, socket.create_connection(("127.0.0.1", proxy), 10) as client:
        assert client.recv(1) == b""


JOB = Job(
    "a job",
    [Contender(name, ["true"], lambda _output: None) for name in ("ours", "theirs", "others")],
    {"theirs": {0: 0.5, 50: 0.4}},
)


@pytest.mark.parametrize(("round_trip", "met"), [(0, True), (50, False)])
def test_ratios_are_of_medians(round_trip, met):
    times = {"ours": [1.0, 2.0, 30.0], "theirs": [4.0, 4.0, 5.0], "others": [1.0, 1.0, 1.0]}
    found = row(JOB, times, round_trip)
    assert found["ratio"] == {"theirs": 0.5, "others": 2.0}
    assert found["aims"]["theirs"]["met"] is met
    assert ("missed" in table([found])) is not met
