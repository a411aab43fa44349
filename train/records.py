"""Records of long work, each written as soon as it is there: a later call goes on where an earlier one stopped."""

import contextlib
import fcntl
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from train.tables import check_file, plain, reading, write_whole

Record = dict[str, Any]


class Records:
    """Results by key; each is written as soon as it is there, one a line, beside those of other processes."""

    def __init__(self, path: Path | None):
        """Reads what an earlier run has left.

        Args:
          path: the file, a JSON list of records; None keeps nothing.

        Raises:
          ValueError: for a folder, or a file of something else.
        """
        check_file("--json", path)
        self._path = path
        self._records: list[Record] = []
        self._found: dict[str, tuple[int, Record | None]] = {}  # by key: the records that were looked at, and the found
        self._read()

    def check_same(self, expected: Mapping[str, Any], settings: Callable[[Record], Mapping[str, Any]]) -> None:
        """Refuses a file with a record of other settings than those of this call.

        Args:
          expected: settings that all records of the file have.
          settings: (record) -> its settings.

        Raises:
          ValueError: with the first setting that differs.
        """
        expected_json = json.loads(json.dumps(expected))
        for record in self._records:
            actual = settings(record)
            for name, value in expected_json.items():
                if actual.get(name) != value:
                    raise ValueError(
                        f"--json must be a file of the same settings, to go on with; got {self._path}, where {name} is "
                        f"{actual.get(name)!r} and not {value!r}. Name another file."
                    )

    def find(self, key: Mapping[str, Any]) -> Record | None:
        """Returns the first record that has all fields of the key; None if there is none."""
        text = json.dumps(key)
        start, found = self._found.get(text, (0, None))
        if found is None and start < len(self._records):
            fields = json.loads(text)  # tuples are lists when they come back
            later = itertools.islice(self._records, start, None)
            found = next((record for record in later if fields.items() <= record.items()), None)
            self._found[text] = len(self._records), found
        return found

    def get(self, key: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> Record:
        """Returns the record of a key: the one that is there, or a new one of what `make` returns."""
        return self.find(key) or self.add({**key, **make()})

    def add(self, record: Mapping[str, Any]) -> Record:
        """Writes a record, and returns it as it will be read."""
        added = json.loads(json.dumps(plain(record)))
        if self._path is None:
            self._records.append(added)
            return added
        self._path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            self._read()
            self._records.append(added)
            write_whole(self._path, "[\n" + ",\n".join(json.dumps(record) for record in self._records) + "\n]\n")
        finally:
            os.close(folder)
        return added

    def _read(self) -> None:
        """Reads the file, to which other processes may have added."""
        path = self._path
        if path is None or not path.exists():
            return
        with reading(path, "a list of records, since --json goes on with it", "Name another file."):
            records = json.loads(path.read_text())
            if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
                raise ValueError(records)
        if records[: len(self._records)] != self._records:  # not only added to
            self._found.clear()
        self._records = records
