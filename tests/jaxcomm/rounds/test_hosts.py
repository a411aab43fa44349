"""What the first process of a worker passes on to its others: every byte, also of what is larger than 2 GiB."""

import numpy as np
import pytest

from jaxcomm.rounds import hosts


class StoppedError(Exception):
    """Ends a test before 2 GiB are copied."""


class Large(bytes):
    """Says that it has more than 2^31 bytes."""

    def __len__(self):
        return (1 << 31) + 5


def processes(monkeypatch):
    """The first process and another; the broadcasts of the first are kept for the other."""
    first, other, sent = hosts.Hosts(), hosts.Hosts(), []
    first.count, other.count, other.is_first = 2, 2, False

    def broadcast(array):
        """Keeps or returns an array of the types that JAX leaves as they are."""
        assert array.dtype.itemsize <= 4
        if broadcast.sender is first:
            sent.append(np.array(array))
            return sent[-1]
        assert (array.shape, array.dtype) == (sent[0].shape, sent[0].dtype)
        return sent.pop(0)

    monkeypatch.setattr(hosts.multihost_utils, "broadcast_one_to_all", broadcast)
    return first, other, broadcast


@pytest.mark.parametrize("piece", [1, 5, 1 << 20])
@pytest.mark.parametrize("parts", [[b"abcde", b"", b"fghijk"], [b""], []])
def test_every_byte_arrives(monkeypatch, parts, piece):
    monkeypatch.setattr(hosts, "PIECE", piece)
    first, other, broadcast = processes(monkeypatch)
    broadcast.sender = first
    assert first.parts(parts) == parts
    broadcast.sender = other
    assert other.parts([]) == parts


def test_sizes_above_31_bits(monkeypatch):
    first, other, broadcast = processes(monkeypatch)
    broadcast.sender, parts = first, [Large(b"a"), Large(b"b")]
    with pytest.raises(ValueError, match="buffer is smaller"):  # as it is, and not what it says
        first.parts(parts)
    broadcast.sender, asked = other, []
    keep = broadcast

    def until_a_piece(array):
        if array.dtype == np.uint8:
            asked.append(array.size)
            raise StoppedError
        return keep(array)

    monkeypatch.setattr(hosts.multihost_utils, "broadcast_one_to_all", until_a_piece)
    with pytest.raises(StoppedError):
        other.parts([])
    assert asked == [hosts.PIECE]
    assert hosts.PIECE < 1 << 31
