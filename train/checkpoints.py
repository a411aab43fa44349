"""Checkpoints: the whole state of a run, including the compressor's, which has one row per worker."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import jaxcomm as jc
from jaxcomm.kernels.numerics import digest
from jaxcomm.types import is_per_worker

CHECKSUMS = "checksums"  # the key of the digests, alongside the arrays of a state, and of that of a JSON object
Resize = Callable[[jc.state.TrainState, int], jc.state.TrainState]


class SettingsError(ValueError):
    """A checkpoint can be read, but is of another run."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint, read back.

    Attributes:
      step: the steps that are done.
      state: the train state on the mesh.
      data: the position of the data, as its `state()` gave it.
      message: what was done if the number of workers or steps differs; empty otherwise.
    """

    step: int
    state: jc.state.TrainState
    data: dict[str, Any]
    message: str


class Checkpoints:
    """The checkpoints of one run in one folder."""

    def __init__(self, folder: Path):
        """Opens the folder, which need not exist; the two newest checkpoints are kept."""
        for name in ("absl", "asyncio"):  # Orbax's threads log stacks of errors that it also raises
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._hook, sys.unraisablehook = sys.unraisablehook, partial(_say_unless_closed, sys.unraisablehook)
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """On an error, waits for Orbax's threads, which print stacks if the interpreter ends before they do."""
        if error is None:
            sys.unraisablehook = self._hook
        elif jax.process_count() == 1:  # with several processes, the others may never come
            with contextlib.suppress(Exception):
                self._manager.wait_until_finished()

    def save(self, step: int, state: jc.state.TrainState, data: dict[str, Any], about: dict[str, Any]) -> None:
        """Writes a checkpoint in the background; does nothing if this step has one.

        Args:
          step: the steps that are done.
          state: the train state.
          data: the position of the data, JSON.
          about: what must be the same when the run goes on, JSON.
        """
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_with_checksums(_plain(state))),
                data=ocp.args.JsonSave(data | {CHECKSUMS: _crc32(data)}),
                about=ocp.args.JsonSave(about | {CHECKSUMS: _crc32(about)}),
            ),
        )

    def last(self) -> int | None:
        """Returns the step of the newest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def preempted(self, step: int) -> bool:
        """Returns whether the processes of a run have agreed to stop at this step, because one got SIGTERM."""
        return self._manager.reached_preemption(step)

    def newest(
        self, like: jc.state.TrainState, resize: Resize, about: dict[str, Any], say: Callable[[str], None]
    ) -> Restored | None:
        """Restores the newest checkpoint that can be read; returns None if there are no checkpoints.

        Newer ones that cannot be read are moved to `damaged-STEP`, next to the folder.

        Args:
          like: see `restore`.
          resize: see `restore`.
          about: see `restore`.
          say: called with one line for each checkpoint that is passed over, and why.

        Raises:
          SettingsError: see `restore`.
          ValueError: if there are checkpoints, and none can be read.
        """
        steps, damaged = sorted(self._manager.all_steps(), reverse=True), []
        for step in steps:
            restored, error = None, None
            try:
                restored = self.restore(step, like, resize, about)
            except SettingsError:
                raise
            except Exception as caught:  # of Orbax, TensorStore and JSON, of many kinds
                error = caught
            if not _all(restored is not None):
                reason = "another process cannot read it" if error is None else f"{type(error).__name__}: {error}"
                say(f"the checkpoint of step {step} is passed over, {reason.splitlines()[0]}")
                damaged.append(step)
                continue
            for bad_step in damaged:
                self._put_aside(bad_step)
            self._manager.reload()
            return restored
        if damaged:
            raise ValueError(
                f"--resume must find a checkpoint that can be read; got none in {self.folder} of steps "
                f"{', '.join(map(str, steps))}. Copy them again, or begin anew without --resume."
            )
        return None

    def _put_aside(self, step: int) -> None:
        if jax.process_index() == 0:
            place, number = self.folder.parent / f"damaged-{step}", 1
            while place.exists():
                place, number = self.folder.parent / f"damaged-{step}-{number + 1}", number + 1
            (self.folder / str(step)).rename(place)
        _all(True)

    def restore(self, step: int, like: jc.state.TrainState, resize: Resize, about: dict[str, Any]) -> Restored:
        """Restores a checkpoint for the run's number of workers.

        Args:
          step: the checkpoint's step.
          like: a fresh state of the run, on the mesh.
          resize: carries a state over to another number of workers: `step.resize` of the run's step.
          about: what must be the same, except that workers may differ in number, and there may be more steps.

        Raises:
          SettingsError: if the checkpoint is of another experiment, or its number of workers cannot become the run's.
          ValueError: if an array, a setting or the position of the data is not what was saved.
        """
        head = self._manager.restore(
            step, args=ocp.args.Composite(data=ocp.args.JsonRestore(), about=ocp.args.JsonRestore())
        )
        for name in ("about", "data"):
            if head[name].pop(CHECKSUMS, None) != _crc32(head[name]):
                raise ValueError(f"{name}/metadata is not what was saved: its checksum differs")
        if head["data"]["step"] != step:
            raise ValueError(f"its data are at step {head['data']['step']}")
        message = check_settings(self.folder, head["about"], about)
        old, new = head["about"]["workers"], about["workers"]
        if old == new:
            state = self._read(step, _plain(like))
            return Restored(step, _typed(state, like), head["data"], message.strip())
        restored = _typed(self._read(step, self._shapes(step, like)), like)
        try:
            resized = resize(restored, new)
        except ValueError as error:
            raise SettingsError(
                f"The checkpoint in {self.folder} has {old} workers and the run {new}: {error} Or go on with "
                f"--workers {old}."
            ) from None
        state = jax.tree.map(_placed, resized, like)
        message += (
            f"The checkpoint has {old} workers and the run {new}: their residuals were averaged into {new} rows, which "
            "keeps the update that they still owe (the mean over the workers); thresholds are refreshed in the next "
            "step."
        )
        if is_per_worker(like.params):
            message += " The workers' own parameters and optimizers were averaged as well."
        return Restored(step, state, head["data"], message)

    def _shapes(self, step: int, like: jc.state.TrainState) -> dict[str, Any]:
        """Returns NumPy zeros in the shapes of a checkpoint's arrays, by their path.

        Raises:
          SettingsError: if they are not those of the run's state.
        """
        arrays = dict(ocp.StandardCheckpointHandler().metadata(self.folder / str(step) / "state"))
        arrays.pop(CHECKSUMS, None)
        if different := arrays.keys() ^ _plain(like).keys():
            raise SettingsError(
                f"A checkpoint must have the arrays of the run; got one in {self.folder} that differs in "
                f"{', '.join(sorted(different)[:3])}. Go on with the release of jaxcomm that wrote it."
            )
        return {name: np.zeros(array.shape, array.dtype) for name, array in arrays.items()}

    def _read(self, step: int, like: Any) -> Any:
        like = like | {CHECKSUMS: np.zeros(len(like), np.uint32)}
        arrays = dict(
            self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
        )
        checksums = np.asarray(arrays.pop(CHECKSUMS))
        differs = np.asarray(_digests(arrays)) != checksums
        if differs.any():
            names = [name for name, is_other in zip(sorted(arrays), differs, strict=True) if is_other]
            suffix = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{', '.join(names[:3])}{suffix} are not what was saved: their checksums differ")
        return arrays

    def wait(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for what is being written, and closes the folder."""
        self._manager.close()


def earlier_settings(folder: Path) -> dict[str, Any]:
    """Returns what the newest checkpoint in a folder was saved with; {} if there is none, or it cannot be read."""
    steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
    with contextlib.suppress(OSError, ValueError):  # `Checkpoints.newest` says why
        about = json.loads((folder / str(max(steps)) / "about" / "metadata").read_text())
        if about.pop(CHECKSUMS, None) == _crc32(about):
            return about
    return {}


def check_settings(folder: Path, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Refuses to go on from a checkpoint of other settings; workers may differ in number, and steps grow.

    Args:
      folder: of the checkpoint.
      earlier: its settings.
      now: the run's settings.

    Returns:
      What to say if there are more steps; "" otherwise.

    Raises:
      SettingsError: with what differs.
    """
    message, grows = "", earlier.get("steps", 0) < now.get("steps", 0)
    if grows:
        message = f"The run of {earlier['steps']} steps is now one of {now['steps']}, and so is its schedule. "
    names = [name for name in {**now, **earlier} if name != "workers" and not (grows and name == "steps")]
    names = [name for name in names if earlier.get(name) != now.get(name)]
    if names:
        different = [f"{name} {earlier.get(name)!r} (now {now.get(name)!r})" for name in names]
        raise SettingsError(
            f"A run must go on with the settings that it began with; got a checkpoint in {folder} with "
            f"{', '.join(different)}. Give the same settings, or another --out, or no --resume."
        )
    return message


def _say_unless_closed(before: Callable[[Any], object], unraisable: Any) -> None:
    """Prints an error that nobody can catch, except those of TensorStore's threads after a failed read or write."""
    if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
        before(unraisable)


@jax.jit
def _digests(plain: dict[str, Any]) -> jax.Array:
    """Returns the digest of every array, in the order of their names: (n,) uint32."""
    return jnp.stack([digest(jnp.asarray(plain[name])) for name in sorted(plain)])


def _crc32(record: dict[str, Any]) -> int:
    return crc32(json.dumps(record, sort_keys=True).encode())


def _with_checksums(plain: dict[str, Any]) -> dict[str, Any]:
    return plain | {CHECKSUMS: _digests(plain)}


def _all(ok: bool) -> bool:
    """Returns whether `ok` is true on all processes, which wait for each other."""
    if jax.process_count() == 1:
        return ok
    return bool(np.all(multihost_utils.process_allgather(np.array(ok))))


def _plain(state: Any) -> dict[str, Any]:
    """Returns the leaves of a state by their path, a form that any version of Orbax can write.

    Arrays without elements (the thresholds of a model without a compressed tensor) are left out.
    """
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if np.prod(np.shape(leaf), dtype=int) > 0
    }


def _typed(plain: dict[str, Any], like: Any) -> Any:
    """Puts leaves by path back into a state; the inverse of `_plain`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: plain.get(jax.tree_util.keystr(path), leaf), like)


def _placed(array: Any, like: jax.Array) -> jax.Array:
    """Returns a NumPy array with the type and the sharding of `like`."""
    array = np.asarray(array, like.dtype)
    if array.shape != like.shape:
        raise SettingsError(
            "With another number of workers, arrays must keep their shapes, except for rows of workers; got "
            f"{array.shape} for {like.shape}. Go on with as many workers as before."
        )
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: array[index])
