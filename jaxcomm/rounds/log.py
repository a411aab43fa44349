"""The log of a run, as one worker reads and writes it: payloads, the manifest that says which count, and snapshots.

Nothing here computes on devices or knows the model. In round r a worker puts its payload and then does, like every
other worker, what `_decide` says; whoever is first writes the manifest. All read that one manifest, so that the global
state is a function of the log: of the snapshot before round s, and of the payloads in the manifests from s on.
"""

import json
import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxcomm.rounds import records
from jaxcomm.rounds.clock import Waiting
from jaxcomm.rounds.records import DamagedError, Manifest, Member
from jaxcomm.rounds.store import Objects

SHORTEST_POLL, LONGEST_POLL = 0.02, 5.0  # seconds
MOST_DOUBLINGS = 10  # of the grace
MOST_KNOWN = 64  # manifests that are not read again
# A grace of more than a round's usual time brings workers that began in the middle of a round in step with the others.
FIRST_GRACE, LONGER = 2.0, 1.2  # seconds while that time is not known, and in units of it
PATIENCE = 60.0  # seconds without a quorum before a warning


class Decided(NamedTuple):
    """A round that is over: its manifest, and the words of its members' payloads in the manifest's order."""

    manifest: Manifest
    words: list[np.ndarray]


class News(NamedTuple):
    """What a worker learns from the log.

    Attributes:
      own: the manifest of the round in which the worker has taken part; None if the run was over before.
      snapshot: the newest snapshot, if older rounds are removed or the state must be read anew: its number and object.
      rounds: the rounds that follow, each the next of the one before.
    """

    own: Manifest | None
    snapshot: tuple[int, bytes] | None
    rounds: list[Decided]


@dataclass
class Log:
    """A run in a store.

    Attributes:
      objects: the store.
      name: the worker's name.
      n_words: words of a payload.
      norm: (words, round) -> the L2 norm of the change in a payload; NaN or infinity if it is not finite.
      quorum: payloads without which no round ends.
      grace: seconds to wait for others after the quorum; None for a little more than a round's usual time.
      steps: local steps of a round.
      limit: the largest norm of a payload that counts, in units of the round's median.
      total: rounds of the run; None for a run without end.
      previous: the manifest of the last round that was read.
      put: the last round into which a payload was put.
    """

    objects: Objects
    name: str
    n_words: int
    norm: Callable[[np.ndarray, int], float]
    quorum: int
    grace: float | None
    steps: int
    limit: float
    total: int | None
    previous: Manifest | None = None
    put: int | None = None
    _cache: dict[str, bytes] = field(default_factory=dict)
    _known: dict[int, Manifest] = field(default_factory=dict)

    # What all workers agree on.

    def agree(self, settings: Mapping[str, Any]) -> Waiting[None]:
        """Writes the run's settings, or compares them with those that are there.

        Raises:
          ValueError: naming the first setting that differs.
        """
        mine = json.loads(json.dumps(settings))
        if (yield from self.objects.create(records.SETTINGS, json.dumps(mine, indent=1).encode())):
            return
        raw = yield from self.objects.read(records.SETTINGS)
        try:
            theirs = json.loads(raw or b"")
        except ValueError:
            theirs = None
        if not isinstance(theirs, dict):
            raise ValueError("store must hold a run of jaxcomm, or nothing; got another 'settings'. Take a new folder.")
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                raise ValueError(
                    f"{key} must be that of the run in the store, {theirs.get(key)!r}; got {mine.get(key)!r}. Pass the "
                    "same, or start a new run in another folder."
                )

    # Reading.

    def resume(self, own: Manifest | None = None) -> Waiting[News]:
        """Reads the newest snapshot, and all rounds that follow."""
        while True:
            numbers = yield from self._snapshots()
            number = max(numbers, default=0)
            raw = yield from self.objects.read(records.snapshot_path(number))
            if raw is None:
                if not numbers:
                    raise ValueError("store must have a snapshot; got a run without. Start it in another folder.")
                continue  # a newer one has replaced it
            rounds = yield from self._following(number)
            if rounds is not None:
                return News(own, (number, raw), rounds)

    def follow(self, number: int, own: Manifest | None = None) -> Waiting[News]:
        """Reads the rounds from a number on that are over; from the newest snapshot on if some are removed."""
        rounds = yield from self._following(number, None if own is None else own.number)
        if rounds is None:
            return (yield from self.resume(own))
        return News(own, None, rounds)

    def manifest(self, number: int) -> Waiting[Manifest | None]:
        """Reads a round's manifest; None if the round is not over."""
        if number in self._known:
            return self._known[number]
        raw = yield from self.objects.read(records.manifest_path(number))
        return None if raw is None else self._learn(number, raw)

    def _learn(self, number: int, raw: bytes) -> Manifest:
        """Reads the bytes of a manifest."""
        try:
            manifest = Manifest.of(raw)
        except DamagedError as error:
            path = records.manifest_path(number)
            raise ValueError(
                f"A manifest must be one that a worker wrote; got {error} in {path!r}. Somebody else writes to the "
                "store: start a new run from a checkpoint."
            ) from None
        if self.previous is None or self.previous.number < number:
            self.previous = manifest
        self._known[number] = manifest
        self._known.pop(number - MOST_KNOWN, None)
        return manifest

    def _following(self, number: int, last: int | None = None) -> Waiting[list[Decided] | None]:
        """Returns the rounds that are over, from a number on, to `last` if that is given.

        None if a payload is removed, and a newer snapshot has replaced it.
        """
        rounds: list[Decided] = []
        while last is None or number <= last:
            if (manifest := (yield from self.manifest(number))) is None:
                break
            words = []
            for member in manifest.members:
                path = records.payload_path(number, member.header.worker)
                raw = self._cache.get(path) or (yield from self.objects.read(path))
                if raw is None or records.digest(raw) != member.digest:
                    if max((yield from self._snapshots()), default=0) > number:
                        return None
                    what = "nothing" if raw is None else "another object"
                    raise ValueError(
                        f"A payload in a manifest must stay in the store until a snapshot replaces it; got {what} at "
                        f"{path!r}. Somebody else writes to the store: start a new run from a checkpoint."
                    )
                words.append(records.read_payload(raw, member.header.worker, self.n_words)[1])
            rounds.append(Decided(manifest, words))
            self._cache.clear()
            number += 1
        return rounds

    def _snapshots(self) -> Waiting[list[int]]:
        names = yield from self.objects.sizes("snapshots")
        return sorted(int(name) for name in names if name.isdigit())

    # Writing.

    def take_part(self, number: int, missed: int, payload: Callable[[int], bytes | None]) -> Waiting[News]:
        """Puts a payload into the round that is open, waits until that is over, and reads what has happened since.

        Args:
          number: the round that the worker knows to come next.
          missed: how many of the worker's payloads in a row were late.
          payload: (round) -> the object to put, or None to put none and only to follow the others.
        """
        opened = number
        while (yield from self.manifest(opened)) is not None:
            opened += 1
        if self.total is not None and opened >= self.total:
            return (yield from self.follow(number))
        yield from self.objects.create(f"{records.round_prefix(opened)}/coming/{self.name}.{missed}", b"")
        raw = payload(opened)
        path = records.payload_path(opened, self.name)
        if raw is not None and not (yield from self.objects.create(path, raw)):
            there = yield from self.objects.read(path)
            if there is not None and there != raw:
                warnings.warn(
                    f"Round {opened} has another payload of {self.name!r}: this worker has put it before it was "
                    "stopped, or another one has the same name.",
                    stacklevel=2,
                )
        self.put = opened
        own = yield from self.outcome(opened)
        return (yield from self.follow(number, own))

    def outcome(self, number: int) -> Waiting[Manifest]:
        """Waits until a round is over; removes the worker's payload if it does not count."""
        manifest = yield from self._decide(number)
        if self.name not in {member.header.worker for member in manifest.members}:
            yield from self.objects.remove([records.payload_path(number, self.name)])
        return manifest

    def _decide(self, number: int) -> Waiting[Manifest]:
        """Writes a round's manifest as soon as it may be written, unless another worker is first."""
        checked: dict[str, Member | str] = {}
        began, quorum_at, has_warned, clock = self.objects.clock.now(), None, False, self.objects.clock
        previous = self.previous
        usual = None if previous is None else previous.usual_seconds(self.steps)
        poll = 0.2 if usual is None else min(max(usual / 50, SHORTEST_POLL), LONGEST_POLL)
        grace = self.grace if self.grace is not None else (FIRST_GRACE if usual is None else LONGER * usual)
        while True:
            sizes = yield from self.objects.sizes(records.round_prefix(number))
            names = [name.removeprefix("payload/") for name in sizes if name.startswith("payload/")]
            coming = dict(_announced(name) for name in sizes if name.startswith("coming/"))
            for name in names:
                if name not in checked and records.is_name(name):
                    size = sizes[f"payload/{name}"]
                    checked[name] = yield from self._checked(records.payload_path(number, name), name, number, size)
            members, refused, state = judged(checked, number, self.limit)
            if len(members) >= self.quorum:
                quorum_at = clock.now() if quorum_at is None else quorum_at
                before = () if previous is None else previous.members
                awaited = ({member.header.worker for member in before} | coming.keys()) - checked.keys()
                doublings = min(max((coming.get(name, 0) for name in awaited), default=0), MOST_DOUBLINGS)
                if not awaited or clock.now() - quorum_at >= grace * 2**doublings:
                    raw = Manifest(number, state, tuple(members), refused, self.name).to_bytes()
                    if (yield from self.objects.create(records.manifest_path(number), raw)):
                        return self._learn(number, raw)
            elif not has_warned and clock.now() - began > PATIENCE:
                has_warned = True
                warnings.warn(
                    f"Round {number} has waited for {PATIENCE:.0f} s; it needs {self.quorum} payloads and has those of "
                    f"{sorted(member.header.worker for member in members)}; refused: {refused}.",
                    stacklevel=2,
                )
            if (manifest := (yield from self.manifest(number))) is not None:
                return manifest
            yield poll

    def _checked(self, path: str, name: str, number: int, size: int) -> Waiting[Member | str]:
        """Reads a payload: what a manifest would say of it, or why it is refused."""
        if size > records.MAX_HEADER + 4 * self.n_words + 64:
            return f"length: {size} bytes"
        raw = yield from self.objects.read(path)
        try:
            header, words = records.read_payload(raw or b"", name, self.n_words)
        except DamagedError as error:
            return f"damaged: {error}"
        if header.base > number:
            return f"damaged: packed for round {header.base}"
        if header.base < number:
            then = yield from self.manifest(header.base)
            if then is None or then.state not in ("", header.state):
                return f"state: {header.state} before round {header.base} instead of {then and then.state}"
        norm = self.norm(words, header.base)
        if not math.isfinite(norm):
            return "not finite"
        self._cache[path] = raw or b""
        return Member(header, records.digest(raw or b""), norm)

    def save(self, number: int, snapshot: bytes) -> Waiting[None]:
        """Writes the snapshot before a round; removes all but the last two, and what only older ones need."""
        if max((yield from self._snapshots()), default=-1) >= number:
            return
        yield from self.objects.create(records.snapshot_path(number), snapshot)
        numbers = yield from self._snapshots()
        oldest = numbers[-2:][0]  # to be kept
        yield from self.objects.remove(records.snapshot_path(old) for old in numbers if old < oldest)
        paths = [path for path in (yield from self.objects.sizes("rounds")) if path[:8].isdigit()]
        yield from self.objects.remove(f"rounds/{path}" for path in paths if int(path[:8]) < oldest)


def judged(checked: Mapping[str, Member | str], number: int, limit: float) -> tuple[list[Member], dict[str, str], str]:
    """Says which payloads count in a round, in the order of their names; why others do not; and the state before it.

    The state is the one of most payloads that were packed for this round. A payload counts if it is whole, its worker
    has that state, and its norm is at most `limit` times the median. Of two payloads none can be told to be the wrong
    one, so that norms are compared from three on. The state is "" where all payloads were packed for earlier rounds.
    """
    refused = {name: reason for name, reason in checked.items() if isinstance(reason, str)}
    whole = [item for _, item in sorted(checked.items()) if isinstance(item, Member)]
    states = [member.header.state for member in whole if member.header.base == number]
    state = max(sorted(set(states)), key=states.count, default="")
    median = statistics.median_high([m.norm for m in whole]) if len(whole) > 2 else math.inf
    members = []
    for member in whole:
        if member.header.base == number and member.header.state != state:
            refused[member.header.worker] = f"state: {member.header.state} instead of {state}"
        elif member.norm > limit * median > 0:
            refused[member.header.worker] = f"norm: {member.norm:.3g}, and the median is {median:.3g}"
        else:
            members.append(member)
    return members, refused, state


def _announced(path: str) -> tuple[str, int]:
    """Reads "coming/ID.2": the name, and how many of its payloads were late."""
    name, _, missed = path.removeprefix("coming/").rpartition(".")
    return name, int(missed) if missed.isdigit() and len(missed) < 3 else 0
