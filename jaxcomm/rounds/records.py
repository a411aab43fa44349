"""What the objects of a run hold: settings, payloads, manifests, snapshots. JSON and raw numbers; nothing is unpickled.

settings                      what all workers agree on; the first writer wins
rounds/00000012/coming/ID.2   the payload of worker ID is on its way; 2 of its last payloads were late
rounds/00000012/payload/ID    a header, and the words that `Exchange.pack` made
manifests/00000012            which payloads of round 12 count; written once
snapshots/00000010            the global state before round 10
workers/ID                    what a worker that has left has not sent
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

SETTINGS = "settings"
MAX_HEADER = 1 << 16  # bytes of the JSON before an object's numbers
_MAGIC = b"jaxcomm-rounds-1\n"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")


def manifest_path(number: int) -> str:
    """Returns where the manifest of a round is."""
    return f"manifests/{number:08}"


def snapshot_path(number: int) -> str:
    """Returns where the global state before a round is."""
    return f"snapshots/{number:08}"


def round_prefix(number: int) -> str:
    """Returns where the payloads of a round are."""
    return f"rounds/{number:08}"


def payload_path(number: int, name: str) -> str:
    """Returns where a worker's payload of a round is."""
    return f"{round_prefix(number)}/payload/{name}"


def worker_path(name: str) -> str:
    """Returns where a worker leaves what it has not sent."""
    return f"workers/{name}"


def is_name(name: object) -> bool:
    """Returns whether this can be a worker's name, which is part of paths."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


class DamagedError(ValueError):
    """An object is not what its writer wrote, or not an object of this run."""


@dataclass(frozen=True)
class Header:
    """What a payload says of itself.

    Attributes:
      worker: the sender's name.
      base: the round for which it was packed; a late one counts in a later round.
      state: digest of the global state before that round, as the sender has it.
      rows: the payload's weight: rows of data that the change was trained on.
      steps: local steps since the sender's last payload.
      pace: the sender's seconds a local step.
    """

    worker: str
    base: int
    state: str
    rows: float
    steps: int
    pace: float


@dataclass(frozen=True)
class Member:
    """A payload that counts.

    Attributes:
      header: what it says of itself.
      digest: SHA-256 of the whole object.
      norm: L2 norm of the change that it holds.
    """

    header: Header
    digest: str
    norm: float


@dataclass(frozen=True)
class Manifest:
    """Which payloads of a round count, in the order in which they are summed.

    Attributes:
      number: the round's number.
      state: digest of the global state before the round.
      members: the payloads that count.
      refused: by worker, the reason why its payload does not.
      writer: the worker that wrote this.
    """

    number: int
    state: str
    members: tuple[Member, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    writer: str = ""

    @property
    def rows(self) -> float:
        """The weights of all members together."""
        return sum(member.header.rows for member in self.members)

    def find(self, digest: str) -> Member | None:
        """Returns the member whose payload has a digest, or None."""
        return next((member for member in self.members if member.digest == digest), None)

    def usual_seconds(self, steps: int) -> float:
        """Returns the seconds that the (lower) median member takes for some local steps."""
        paces = sorted(member.header.pace for member in self.members)
        return steps * paces[(len(paces) - 1) // 2]

    def to_bytes(self) -> bytes:
        """Writes it as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, raw: bytes) -> "Manifest":
        """Reads what `to_bytes` wrote.

        Raises:
          DamagedError: for anything else.
        """
        record = _read(cls, _loaded(raw))
        members = [_read(Member, member) for member in record.members]
        members = [Member(_read(Header, m.header), m.digest, m.norm) for m in members]
        is_one = bool(members) and all(_DIGEST.fullmatch(m.digest) and _is_header(m.header) for m in members)
        if not is_one or not isinstance(record.refused, dict):
            raise DamagedError("a manifest without members, or with damaged ones")
        return cls(record.number, record.state, tuple(members), record.refused, record.writer)


def write_payload(header: Header, words: np.ndarray) -> bytes:
    """Writes a payload as one object."""
    return join(asdict(header), [words])


def read_payload(raw: bytes, worker: str, n_words: int) -> tuple[Header, np.ndarray]:
    """Reads a worker's payload of `n_words` words.

    Raises:
      DamagedError: with the reason.
    """
    record, body = split(raw)
    header = _read(Header, record)
    if not _is_header(header):
        raise DamagedError("a header with numbers out of range")
    if header.worker != worker:
        raise DamagedError(f"the header of {header.worker!r}")
    if len(body) != 4 * n_words:
        raise DamagedError(f"{len(body)} bytes of words instead of {4 * n_words}")
    return header, np.frombuffer(body, np.uint32)


def join(record: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Writes a JSON record and arrays, end to end, with a digest of the arrays."""
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    head = json.dumps({**record, "body": digest(body)}).encode()
    return b"".join([_MAGIC, len(head).to_bytes(4, "little"), head, body])


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Reads the record and the bytes of the arrays that `join` wrote.

    Raises:
      DamagedError: if they are not as they were written.
    """
    start = len(_MAGIC) + 4
    size = int.from_bytes(raw[len(_MAGIC) : start], "little")
    if not raw.startswith(_MAGIC) or size > MAX_HEADER or len(raw) < start + size:
        raise DamagedError("an object of another kind")
    record, body = _loaded(raw[start : start + size]), raw[start + size :]
    if record.pop("body", None) != digest(body):
        raise DamagedError("a wrong digest")
    return record, body


def split_arrays(body: bytes, like: Sequence[Any]) -> list[np.ndarray]:
    """Cuts bytes into arrays of the shapes and dtypes of `like`.

    Raises:
      DamagedError: if they are of another length.
    """
    sizes = [x.size * np.dtype(x.dtype).itemsize for x in like]
    if sum(sizes) != len(body):
        raise DamagedError(f"{len(body)} bytes of arrays instead of {sum(sizes)}")
    parts = zip(like, sizes, itertools.accumulate(sizes), strict=True)
    return [np.frombuffer(body[end - size : end], x.dtype).reshape(x.shape) for x, size, end in parts]


def digest(raw: bytes) -> str:
    """Returns the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(raw).hexdigest()


def _is_header(header: Header) -> bool:
    numbers = (header.base, header.rows, header.steps, header.pace)
    if not is_name(header.worker) or not all(type(number) in (int, float) for number in numbers):
        return False
    return 0 < header.rows < 1e15 and min(numbers) >= 0 and max(header.base, header.steps, header.pace) < 1e9


def _loaded(raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw)
    except ValueError:
        raise DamagedError("no JSON") from None
    if not isinstance(record, dict):
        raise DamagedError("no record")
    return record


def _read(kind: type[T], record: Any) -> T:
    """Makes a record of a class of a dict that has its fields, and no others."""
    if not isinstance(record, dict) or record.keys() != {item.name for item in fields(kind)}:  # type: ignore[arg-type]
        raise DamagedError(f"no {kind.__name__.lower()}")
    return kind(**record)
