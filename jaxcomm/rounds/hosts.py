"""The processes of one worker that has several: the first talks to the store, and tells the others."""

import json
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxcomm.rounds.clock import T, Waiting
from jaxcomm.rounds.log import Decided, News
from jaxcomm.rounds.records import Manifest

PIECE = 1 << 28  # bytes of a broadcast at most: in 2^31 and more, elements are not counted in 32 bits


class Hosts:
    """All processes of `jax.distributed`; without it, one, which has nobody to tell."""

    def __init__(self) -> None:
        self.count, self.is_first = jax.process_count(), jax.process_index() == 0

    def first(self, work: Waiting[T]) -> Waiting[T | None]:
        """Does work on the first process; returns None on the others."""
        if self.is_first:
            return (yield from work)
        return None

    def flag(self, value: int | bool | None) -> int:
        """Returns the number of the first process. Costs a broadcast of 4 bytes."""
        if self.count == 1:
            return int(value or 0)
        return int(multihost_utils.broadcast_one_to_all(np.int32(value or 0)))

    def parts(self, parts: Sequence[bytes]) -> list[bytes]:
        """Returns the bytes of the first process."""
        if self.count == 1:
            return list(parts)
        count = self.flag(len(parts))
        sizes = np.array([*map(len, parts)] if self.is_first else [0] * count, np.int64)
        # As words: without jax_enable_x64, JAX makes 32 bits of 64.
        sizes = np.asarray(multihost_utils.broadcast_one_to_all(sizes.view(np.uint32))).view(np.int64)
        ends, message, pieces = np.cumsum(sizes), b"".join(parts), []
        total = int(sizes.sum())
        for at in range(0, total, PIECE):
            size = min(PIECE, total - at)
            piece = np.frombuffer(message, np.uint8, size, at) if self.is_first else np.zeros(size, np.uint8)
            pieces.append(np.asarray(multihost_utils.broadcast_one_to_all(piece)).tobytes())
        whole = b"".join(pieces)
        return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def news(self, news: News | None) -> News:
        """Returns the news of the first process."""
        if self.count == 1:
            assert news is not None, "it is the first"
            return news
        parts = []
        if news is not None:
            head = {"own": news.own is not None, "snapshot": None if news.snapshot is None else news.snapshot[0]}
            parts = [json.dumps(head).encode(), b"" if news.own is None else news.own.to_bytes()]
            parts.append(b"" if news.snapshot is None else news.snapshot[1])
            for manifest, words in news.rounds:
                parts += [manifest.to_bytes(), *(own_words.tobytes() for own_words in words)]
        raw_head, own, snapshot, *rest = self.parts(parts)
        head, rounds = json.loads(raw_head), []
        while rest:
            manifest = Manifest.of(rest[0])
            words = [np.frombuffer(raw, np.uint32) for raw in rest[1 : 1 + len(manifest.members)]]
            rounds.append(Decided(manifest, words))
            rest = rest[1 + len(words) :]
        where = None if head["snapshot"] is None else (head["snapshot"], snapshot)
        return News(Manifest.of(own) if head["own"] else None, where, rounds)
