"""A lab's switch in user space, which passes on frames later: what `netem` would do. Needs only Python.

    ip netns exec NAMESPACE python benchmarks/switch.py PORTS DELAY JITTER

It joins the interfaces port0, port1, ... of its namespace in place of a bridge, by packet sockets. Segments pass
whole, as the kernel made them, with their virtio-net headers, so that Python keeps up. A frame waits DELAY seconds and
a random time of at most JITTER seconds; frames of one port stay in order.
"""

import argparse
import contextlib
import heapq
import itertools
import random
import select
import socket
import time

READY = "ready"  # what it says when it passes on frames

_ALL = 3  # frames of every protocol: ETH_P_ALL of linux/if_ether.h
_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23  # SOL_PACKET and its options, of linux/if_packet.h
_SEND_BUFFER, _RECEIVE_BUFFER = 32, 33  # SO_SNDBUFFORCE, SO_RCVBUFFORCE
_HEADER = 10  # bytes of the virtio-net header before a frame
_BUFFER = 1 << 26  # bytes: the queues of the links decide what is dropped, not a socket's
_AT_ONCE = 32  # frames that are read from a port before the next


def open_port(interface: str) -> socket.socket:
    """Returns a socket for the frames of an interface, each after its virtio-net header."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # nothing arrives before it is bound
    port.setsockopt(_PACKET, _VNET_HEADER, 1)
    port.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, _SEND_BUFFER, _BUFFER)
    port.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER, _BUFFER)
    port.setblocking(False)
    port.bind((interface, _ALL))
    return port


def switch(ports: list[socket.socket], delay: float, jitter: float) -> None:
    """Passes on frames for ever."""
    count, port_of, last = itertools.count(), dict[bytes, int](), [0.0] * len(ports)
    waiting: list[tuple[float, int, int, bytes]] = []  # due, a number that breaks ties, source, frame
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, source, frame = heapq.heappop(waiting)
            target = port_of.get(frame[_HEADER : _HEADER + 6])
            for number in range(len(ports)) if target is None else (target,):
                if number != source:
                    with contextlib.suppress(OSError):  # the link is down, or its queue is full
                        ports[number].send(frame)
        readable, _, _ = select.select(ports, [], [], max(0.0, waiting[0][0] - now) if waiting else None)
        now = time.monotonic()
        for port in readable:
            source = ports.index(port)
            with contextlib.suppress(OSError):  # there are no more, or the link is down
                for _ in range(_AT_ONCE):
                    frame = port.recv(1 << 17)
                    port_of[frame[_HEADER + 6 : _HEADER + 12]] = source
                    last[source] = max(last[source], now + delay + random.uniform(0.0, jitter))
                    heapq.heappush(waiting, (last[source], next(count), source, frame))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ports", type=int)
    parser.add_argument("delay", type=float, help="seconds")
    parser.add_argument("jitter", type=float, help="seconds")
    args = parser.parse_args()
    links = [open_port(f"port{number}") for number in range(args.ports)]
    print(READY, flush=True)
    switch(links, args.delay, args.jitter)
