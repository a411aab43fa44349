"""The lab of workers that come and go, and its relay."""

import importlib.util
import json
import socket
import threading
import time

import pytest

from benchmarks.relay import Relay
from tests.benchmarks.places import CAN_ISOLATE, run


def test_a_relay_adds_its_delay_in_each_direction():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo():
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        relay = Relay(f"127.0.0.1:{server.getsockname()[1]}", 0, 0.05)
        with socket.create_connection(("127.0.0.1", relay.port)) as client:
            begun = time.monotonic()
            client.sendall(b"x" * 300_000)  # at once, and so later by one delay alone
            data = b""
            while len(data) < 300_000:
                data += client.recv(1 << 16)
            assert 0.1 <= time.monotonic() - begun < 1.0
        assert data == b"x" * 300_000


@pytest.mark.slow
@pytest.mark.skipif(not CAN_ISOLATE or importlib.util.find_spec("moto") is None, reason="takes root, and moto's server")
def test_workers_that_come_and_go(tmp_path):
    path = tmp_path / "table.json"
    run("rounds", "--rounds", "8", "--json", str(path))
    rows = json.loads(path.read_text())
    assert [row["worker"] for row in rows] == [*"abcd", "one program"] * 2
    for row in rows:
        if row["worker"] != "one program":
            assert row["received"] < row["bytes_kernel"] < 1.3 * row["received"]
            assert 0 < row["rounds"] <= 8
            assert 0 < row["goodput"] <= 1.05
    assert len({row["digest"] for row in rows[:4]}) == len({row["digest"] for row in rows[5:9]}) == 1
