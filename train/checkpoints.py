"""Checkpoints: the whole state of a run, the compressor's included, one row per worker."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

import jaxcomm as jc
from jaxcomm.parallel.sharded_step import SplitState
from jaxcomm.parallel.state import state_shardings
from jaxcomm.types import is_per_worker


@dataclass(frozen=True)
class Restored:
    """A checkpoint, read back.

    Attributes:
      state: the train state on the mesh.
      data: the position of the data, as its `state()` gave it.
      message: what was done where the number of workers differs; empty otherwise.
    """

    state: jc.TrainState
    data: dict[str, Any]
    message: str


class Checkpoints:
    """The checkpoints of one run in one folder."""

    def __init__(self, folder: Path):
        """Opens the folder, which need not exist; the two newest checkpoints are kept."""
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def save(self, step: int, state: jc.TrainState, data: dict[str, Any], about: dict[str, Any]) -> None:
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
                state=ocp.args.StandardSave(_plain(state)),
                data=ocp.args.JsonSave(data),
                about=ocp.args.JsonSave(about),
            ),
        )

    def last(self) -> int | None:
        """Returns the step of the newest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def preempted(self, step: int) -> bool:
        """Returns whether the processes of a run have agreed to stop at this step, because one got SIGTERM."""
        return self._manager.reached_preemption(step)

    def restore(self, step: int, like: jc.TrainState, mesh: Mesh, about: dict[str, Any]) -> Restored:
        """Reads a checkpoint back, for as many workers as the mesh has.

        Args:
          step: the checkpoint's step.
          like: a fresh state of the run, on the mesh.
          mesh: the mesh.
          about: what must be the same; the number of workers need not.

        Raises:
          ValueError: if the checkpoint is of another experiment, or of another number of workers where the model is
            split.
        """
        head = self._manager.restore(
            step, args=ocp.args.Composite(data=ocp.args.JsonRestore(), about=ocp.args.JsonRestore())
        )
        then = dict(head["about"])
        old, new = then.pop("workers"), about["workers"]
        now = {name: value for name, value in about.items() if name != "workers"}
        different = [f"{name} {then.get(name)!r} (now {now[name]!r})" for name in now if then.get(name) != now[name]]
        if different:
            raise ValueError(
                f"A run goes on with the settings that it began with, got a checkpoint in {self.folder} with "
                f"{', '.join(different)}: give the same settings, or another --out, or no --resume."
            )
        if old == new:
            state = self._read(step, _plain(like))
            return Restored(_typed(state, like), head["data"], "")
        split = {axis: size for axis, size in mesh.shape.items() if axis != "data" and size > 1}
        if split or isinstance(like.opt_state, SplitState):
            kind = f"on a mesh with {split}" if split else "that hold shards of layers"
            raise ValueError(
                "Another number of workers is for workers that hold the whole model each, got a checkpoint of "
                f"{old} workers for {new} {kind}: go on with --workers {old}."
            )
        rows = jax.tree.map(lambda node: _on_host(node, old), like, is_leaf=is_per_worker)
        state = jc.resize_workers(_typed(self._read(step, _plain(rows)), like), new)
        placed = jax.tree.map(
            lambda array, sharding: jax.make_array_from_callback(
                array.shape, sharding, lambda index: np.asarray(array)[index]
            ),
            state,
            state_shardings(like, mesh),
        )
        message = (
            f"The checkpoint has {old} workers and the run {new}: their residuals were averaged into {new} rows, which "
            "keeps the update that they still owe (the mean over the workers); thresholds are renewed in the next step."
        )
        if is_per_worker(like.params):
            message += " The workers' own parameters and optimizers were averaged as well."
        return Restored(placed, head["data"], message)

    def _read(self, step: int, like: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]

    def wait(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for what is being written, and lets the folder go."""
        self._manager.close()


def _plain(state: Any) -> dict[str, Any]:
    """Returns the leaves of a state by their path, which any version of Orbax can write.

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


def _on_host(node: Any, workers: int) -> Any:
    """Returns NumPy zeros in the place of a state's arrays, with rows for as many workers as a checkpoint has."""
    if is_per_worker(node):
        return jax.tree.map(lambda rows: np.zeros((workers, *rows.shape[1:]), rows.dtype), node)
    return np.zeros(node.shape, node.dtype)
