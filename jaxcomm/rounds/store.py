"""The user's object store: put if absent, get, list and delete, each tried again with backoff until a time-out."""

import contextlib
import importlib
import random
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxcomm.checks import check_range
from jaxcomm.rounds.clock import Clock, Waiting

FIRST_DELAY, LONGEST_DELAY = 0.1, 10.0  # seconds between two tries


def open_store(store: Any) -> Any:
    """Returns the obstore store of a URL or a folder; a store of obstore's is returned as it is.

    Raises:
      ValueError: if obstore is missing, or for another kind of argument.
    """
    if all(callable(getattr(store, verb, None)) for verb in ("put", "get", "list", "delete")):
        return store
    rule, remedy = "a URL, a folder, or a store of obstore's", "Pass 's3://bucket/run-7', say"
    check_range("store", store, rule, isinstance(store, str | Path) and store != "", remedy)
    remedy = "Pass a MemoryStore of obstore's, to all workers of one process"
    check_range("store", store, "shared by all workers", not str(store).startswith("memory:"), remedy)
    stores = _obstore("store")
    url = str(store)
    if "://" in url and not url.startswith("file://"):
        options: dict[str, Any] = {"client_options": {"timeout": "300s"}, "retry_config": {"max_retries": 0}}
        return stores.from_url(url, **options)
    folder = Path(url.removeprefix("file://")).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return stores.LocalStore(str(folder))


def _obstore(module: str) -> Any:
    """Imports a module of obstore, which is in the extra `rounds`."""
    try:
        return importlib.import_module(f"obstore.{module}")
    except ImportError:
        raise ValueError(
            "store must be opened by obstore; got an environment without it. Install it: pip install 'jaxcomm[rounds]'."
        ) from None


class Objects:
    """The objects of a run. What fails is tried again, and named.

    Every request begins and ends with a moment (a `yield`) in which other work may run.

    Attributes:
      traffic: bytes of objects "sent" and "received", and "requests", those that failed too.
    """

    def __init__(self, store: Any, clock: Clock, timeout: float):
        """Takes a store of obstore's, and the seconds after which a request that fails is given up."""
        self.store, self.clock, self.timeout = store, clock, timeout
        self.traffic = {"sent": 0, "received": 0, "requests": 0}
        errors = _obstore("exceptions")
        self._exists: tuple[type[Exception], ...] = (
            errors.AlreadyExistsError,
            errors.PreconditionError,
            FileExistsError,
        )
        self._missing: tuple[type[Exception], ...] = (errors.NotFoundError, FileNotFoundError)
        self._final = (
            errors.PermissionDeniedError,
            errors.UnauthenticatedError,
            errors.NotSupportedError,
            errors.InvalidPathError,
            errors.UnknownConfigurationKeyError,
            NotImplementedError,
            PermissionError,
        )

    def create(self, path: str, raw: bytes) -> Waiting[bool]:
        """Writes an object if there is none; returns False if there is one.

        That may be this very object: a request of which only the answer was lost is sent again.
        """

        def put() -> bool:
            self.traffic["sent"] += len(raw)
            try:
                self.store.put(path, raw, mode="create")
            except self._exists:
                return False
            return True

        return (yield from self._tried("create", path, put))

    def read(self, path: str) -> Waiting[bytes | None]:
        """Reads an object; None if there is none."""

        def get() -> bytes | None:
            try:
                raw = bytes(self.store.get(path).bytes())
            except self._missing:
                return None
            self.traffic["received"] += len(raw)
            return raw

        return (yield from self._tried("read", path, get))

    def sizes(self, prefix: str) -> Waiting[dict[str, int]]:
        """Returns the size in bytes of every object below a prefix, by its path below it."""

        def listed() -> dict[str, int]:
            items = [item for page in self.store.list(prefix) for item in page]
            return {item["path"].removeprefix(f"{prefix}/"): item["size"] for item in items}

        return (yield from self._tried("list", prefix, listed))

    def remove(self, paths: Iterable[str]) -> Waiting[None]:
        """Removes objects, if they are there."""

        def delete(path: str) -> None:
            with contextlib.suppress(*self._missing):
                self.store.delete(path)

        for path in paths:
            yield from self._tried("remove", path, lambda path=path: delete(path))

    def _tried(self, verb: str, path: str, request: Callable[[], Any]) -> Waiting[Any]:
        began, delay, draw = self.clock.now(), FIRST_DELAY, random.Random(path)
        while True:
            yield 0.0
            self.traffic["requests"] += 1
            try:
                result = request()
            except Exception as error:
                # What is created or listed cannot be missing itself: the bucket is.
                if isinstance(error, self._final) or (isinstance(error, self._missing) and verb in ("create", "list")):
                    raise ValueError(
                        f"store must let a worker {verb} {path!r}; got {type(error).__name__}: {error}. Check that its "
                        "bucket exists, its credentials, and that it has conditional puts."
                    ) from error
                what = f"The store could not {verb} {path!r}: {type(error).__name__}: {error}"
                if self.clock.now() - began > self.timeout:
                    raise TimeoutError(f"{what}. Gave up after {self.timeout:.0f} s.") from error
                if delay == FIRST_DELAY:
                    warnings.warn(f"{what}. Trying again for {self.timeout:.0f} s.", stacklevel=2)
                yield delay * draw.uniform(0.5, 1.0)
                delay = min(2 * delay, LONGEST_DELAY)
            else:
                yield 0.0
                return result
