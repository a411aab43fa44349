"""The switch with a delay, on sockets in place of interfaces, which take root; `test_netlab.py` has it under TCP."""

import socket
import threading
import time

import pytest

from benchmarks.switch import switch

HEADER, EVERYONE = bytes(10), b"\xff" * 6
DELAY = 0.05


def mac(host):
    return bytes([2, 0, 0, 0, 0, host])


def test_frames():
    """Frames for all, and for a host that has said nothing yet, go to all others; later ones to their host alone."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
    ports, hosts = ([pair[side] for pair in pairs] for side in (0, 1))
    for port in ports:
        port.setblocking(False)
    for host in hosts:
        host.settimeout(10)
    # It runs until the process ends, and keeps both ends open.
    threading.Thread(target=lambda _: switch(ports, DELAY, 0.02), args=(pairs,), daemon=True).start()

    def send(source, target, text):
        frame = HEADER + target + mac(source) + text
        hosts[source].send(frame)
        return frame

    begin = time.monotonic()
    question = send(0, EVERYONE, b"who is host 1?")
    assert [host.recv(100) for host in hosts[1:]] == [question] * 2
    assert time.monotonic() - begin >= DELAY
    answers = [send(1, mac(0), b"%d" % number) for number in range(50)]
    assert [hosts[0].recv(100) for _ in answers] == answers  # in order, whatever the jitter
    unknown = send(0, mac(2), b"to one that has said nothing")
    assert [host.recv(100) for host in hosts[1:]] == [unknown] * 2
    last = send(2, mac(1), b"only for host 1")
    assert hosts[1].recv(100) == last
    for host in (hosts[0], hosts[2]):
        host.settimeout(0.1)
        with pytest.raises(TimeoutError):
            host.recv(100)
