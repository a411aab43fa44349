"""Processes that meet before JAX connects, as threads."""

import contextlib
import socket
import threading
import time

import pytest

from train import rendezvous
from train.rendezvous import meet


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (("FIRST", 0.1), ("SAY", 0.3), ("PAUSE", 0.02)):
        monkeypatch.setattr(rendezvous, name, seconds)
    monkeypatch.setattr(rendezvous, "LATE", 5.0)


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[:2]


def together(address, *members, seconds=20.0, **options):
    """Runs processes of the given (number, count), each in a thread; returns a `Meeting` or an error for each."""
    answers = {}

    def take_part(place, index, count):
        try:
            answers[place] = meet(address, index, count, seconds, **options)
        except (ValueError, OSError) as error:
            answers[place] = error

    threads = [threading.Thread(target=take_part, args=(place, *member)) for place, member in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [answers[place] for place in range(len(members))]


def test_numbers_and_the_port(address):
    answers = together(address, (2, 3), (0, 3), (1, 3))
    assert [(meeting.index, meeting.count, meeting.missing) for meeting in answers] == [
        (2, 3, ()),
        (0, 3, ()),
        (1, 3, ()),
    ]
    with socket.create_server(address):  # for JAX's service, while the connections are open
        pass
    for line in answers[1].lines:
        line.close()
    assert [answers[place].lines[0].recv(1) for place in (0, 2)] == [b"", b""]  # process 0 is gone


def test_missing_members(address, capsys):
    first, second = together(address, (0, 4), (2, 4), seconds=1.0)
    place = f"127.0.0.1:{address[1]}"
    for error in (first, second):
        assert isinstance(error, TimeoutError)
        assert f"processes 1, 3 did not come to {place} within 1 s" in str(error)
    assert f"train: waiting for processes 1, 3 at {place}\n" in capsys.readouterr().err


def test_no_process_0(address, capsys, monkeypatch):
    monkeypatch.setattr(rendezvous, "LATE", 0.0)
    (error,) = together(address, (1, 2), seconds=1.0)
    assert isinstance(error, TimeoutError)
    assert f"process 0 did not come to 127.0.0.1:{address[1]} within 1 s: Connection refused" in str(error)
    assert f"waiting for process 0 at 127.0.0.1:{address[1]} (Connection refused)" in capsys.readouterr().err


def test_fewer_members(address):
    options = {"fits": lambda count: count in (2, 4), "patience": 0.5}
    answers = together(address, (0, 4), (3, 4), **options)
    assert [(member.index, member.count, member.missing) for member in answers] == [(0, 2, (1, 2)), (1, 2, (1, 2))]
    first, second, third = together((address[0], address[1]), (0, 4), (1, 4), (3, 4), **options)
    assert (first.count, second.index, second.missing) == (2, 1, (2, 3))
    assert "the others go on as 2 processes, and without process 3" in str(third)


def test_too_few_members(address):
    (error,) = together(address, (0, 3), seconds=1.0, fits=lambda count: count >= 2, patience=0.1)
    assert "processes 1, 2 did not come" in str(error)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([(0, 3), (1, 3), (1, 3)], "got two processes with --process-id 1. Start each with its own"),
        ([(0, 3), (1, 4)], "got --num-processes 3 in process 0 and 4 in process 1"),
    ],
)
def test_contradictions(members, message, address):
    for error in together(address, *members):
        assert isinstance(error, ValueError)
        assert message in str(error)


HELLO = b'{"process": 1, "count": 2}\n'


def test_members_and_strangers_that_come_again(address):
    answers, sockets, is_over = [], [], threading.Event()
    thread = threading.Thread(target=lambda: answers.extend(together(address, (0, 2))))
    thread.start()
    for text in (
        b"PRI * HTTP/2.0\r\n\r\n",
        b'{"process": "x", "count": 2}\n',
        b'{"process": true, "count": 2}\n',
        b"[]\n",
        b"[" * 4000 + b"\n",
        b"\xff\n",
        HELLO + b"5\n",
        b"x" * (2 * rendezvous.LONGEST),
    ):
        with connected(address) as line, contextlib.suppress(ConnectionError):
            line.sendall(text)
            while line.recv(100):
                pass
    with connected(address) as line:
        line.sendall(HELLO[:-1])  # and ends before the line does
    sockets = [
        connected(address) for _ in range(3)
    ]  # one says nothing, one says its name alone, one a byte now and then
    sockets[1].sendall(HELLO)
    drips = threading.Thread(target=lambda: [sockets[2].send(b"x") for _ in range(100) if not is_over.wait(0.05)])
    drips.start()
    assert [meeting.count for meeting in together(address, (1, 2))] == [2]
    thread.join(20)
    is_over.set()
    drips.join()
    for line in sockets:
        line.close()
    assert [meeting.count for meeting in answers] == [2]


@pytest.mark.parametrize("hello", [HELLO, HELLO + HELLO])
def test_a_number_of_a_lost_host(hello, address, monkeypatch):
    """The connection of a host without power stays open, whether or not it has answered once."""
    monkeypatch.setattr(rendezvous, "ANSWER", 0.5)
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(together(address, (0, 3))))
    thread.start()
    with connected(address) as line:
        line.sendall(hello.replace(b"2", b"3"))
        line.recv(1)  # "wait": it is known
        peers = together(address, (1, 3), (2, 3))
    thread.join(20)
    assert [(meeting.index, meeting.count) for meeting in [*answers, *peers]] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    "text",
    [
        b'{"go": 5}',
        b'{"go": [1]}',
        b'{"go": [null, null, null]}',
        b'{"go": [1, 2, ["x"]]}',
        b'{"go": [5, 9, []]}',
        b'{"end": 5, "is_late": false}',
        b'{"end": "\\u001b[31mred", "is_late": false}',
        b'{"wait": 5}',
        b"[" * 4000,
    ],
)
def test_no_rendezvous(text, address, monkeypatch):
    monkeypatch.setattr(rendezvous, "LATE", 0.0)
    with socket.create_server(address) as server:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as line:
                        line.sendall(text + b"\n")
                        line.recv(100)

        threading.Thread(target=answer, daemon=True).start()
        (error,) = together(address, (1, 2), seconds=0.3)
    assert isinstance(error, TimeoutError)
    assert "another run, or one before this, is there" in str(error)


def connected(address):
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.01)
