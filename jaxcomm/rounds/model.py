"""What a round computes: payloads of what local steps have changed, and the outer step."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.checks import check_range
from jaxcomm.exchange import Exchange, Gradient
from jaxcomm.kernels import noise
from jaxcomm.kernels.numerics import digest, is_applicable_tree, promotes, widened
from jaxcomm.rounds.records import Manifest
from jaxcomm.steps.mesh import mixes_messages
from jaxcomm.types import Params, PyTree


class Global(NamedTuple):
    """The global state before a round, equal on all workers.

    Attributes:
      params: the parameters that the workers train from, float32.
      outer: the outer optimizer's state.
    """

    params: Params
    outer: Any


class Unsent(NamedTuple):
    """What a worker has done and not sent. A change times its rows is what it adds to the model.

    Attributes:
      residual: (1, n), the method's row; None for methods without one.
      weight: the rows of the payload that left this residual.
      change: float32, in the tree of the parameters: the mean change of payloads that did not count.
      rows: the rows of that change; 0 if there is none.
    """

    residual: Any
    weight: float
    change: Any
    rows: float


class Packing(NamedTuple):
    """A payload that is being sent, and what remains of it.

    Attributes:
      words: (m,) uint32.
      ok: () bool, whether it may be sent.
      counted: what is unsent if the payload counts.
      late: what is unsent if it does not.
    """

    words: jax.Array
    ok: jax.Array
    counted: Unsent
    late: Unsent


class Model:
    """The compiled parts of a round, for one shape of parameters, method and outer optimizer."""

    def __init__(self, method: Exchange, outer: optax.GradientTransformation, params: Params):
        """Raises a ValueError for parameters or a method that a payload cannot hold."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            dtype = jnp.result_type(leaf)
            is_one = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4
            remedy = "Keep others out of params, in the loss or in the local state"
            check_range(f"params{jax.tree_util.keystr(path)}", dtype.name, "floats of at most 32 bits", is_one, remedy)
        self.method, self.outer = method, outer
        self.shapes = jax.eval_shape(widened, params)
        self.layout = method.plan(self.shapes)
        self.like = start = jax.eval_shape(self.first, params)  # shapes of a `Global`
        row = jax.ShapeDtypeStruct((1, self.layout.n), method.residual_dtype) if method.keeps_residual else None
        args = (start.params, params, row, self.shapes, (1.0, 0.0, 1.0), 0, 0)
        self.n_words = jax.eval_shape(promotes(self._packed), *args)[0].size
        self._pack, self._add = jax.jit(promotes(self._packed)), jax.jit(promotes(self._added))
        self._step, self._norm = jax.jit(promotes(self._stepped)), jax.jit(promotes(self._norm_of))
        self.change, self.rebase = jax.jit(promotes(_change)), jax.jit(promotes(_rebase))
        self._mean, self.is_finite = jax.jit(promotes(_mean)), jax.jit(is_applicable_tree)
        self._digests = jax.jit(lambda state: jnp.stack([digest(leaf) for leaf in jax.tree.leaves(state)]))
        self.fingerprint = _fingerprint(outer)

    def first(self, params: Params) -> Global:
        """Returns the global state of a run that starts from some parameters."""
        return Global(widened(params), self.outer.init(widened(params)))

    def unsent(self, params: Params) -> Unsent:
        """Returns what a new worker has not sent: zeros, sharded as its parameters are."""
        residual = None
        if self.method.keeps_residual:
            residual = jnp.zeros((1, self.layout.n), self.method.residual_dtype)
            if (mesh := _mesh_of(params)) is not None:
                axes = mesh.axis_names if self.layout.n % mesh.size == 0 else None
                residual = jax.device_put(residual, NamedSharding(mesh, P(None, axes)))
        return Unsent(residual, 0.0, self.change(widened(params), params), 0.0)

    def _packed(
        self, anchor: Params, params: Params, residual: PyTree, change: Params, shares: Any, step: Any, worker: Any
    ) -> tuple[jax.Array, jax.Array, Any, Params]:
        of_new, of_old, of_residual = (jnp.float32(share) for share in shares)
        total = _mean(_change(anchor, params), change, of_new, of_old)
        row = None if residual is None else residual.astype(jnp.float32) * of_residual
        leaves = Gradient(self.layout, jax.tree.leaves(total), jax.tree.leaves(anchor), row)
        packed = self.method.pack(leaves, jnp.int32(step), worker)
        words, row = packed.words, packed.residual
        if row is not None and self.method.residual_dtype != "float32":
            row = noise.round_to_bfloat16(row, noise.make_key(step, worker))
        return words, packed.ok, row, total

    def pack(
        self, anchor: Params, params: Params, rows: float, unsent: Unsent, number: int, worker: np.uint32
    ) -> Packing:
        """Packs what a worker has changed since its last payload, with all that it has not sent.

        Args:
          anchor: the global parameters from which the change is counted, float32.
          params: the worker's own parameters.
          rows: the rows that they were trained on since the last payload.
          unsent: what was not sent before.
          number: the round.
          worker: the worker's number, of random rounding.
        """
        weight = unsent.rows + rows
        shares = (rows / weight, unsent.rows / weight, unsent.weight / weight if unsent.weight else 1.0)
        shares = tuple(map(np.float32, shares))
        mesh, arrays = _mesh_of(anchor), (anchor, params, unsent.residual, unsent.change)
        if mesh is not None and mixes_messages(mesh):  # then no collective is in the loops that select
            arrays = jax.device_put(arrays, NamedSharding(mesh, P()))
        words, ok, residual, change = self._pack(*arrays, shares, np.int32(number), worker)
        if mesh is not None:  # the first process reads the words, and what remains is sharded as it was
            words, ok = jax.device_put((words, ok), NamedSharding(mesh, P()))
            before = (unsent.residual, unsent.change)
            residual, change = jax.tree.map(lambda x, b: jax.device_put(x, b.sharding), (residual, change), before)
        zeros = jax.tree.map(jnp.zeros_like, unsent.change)
        late = unsent._replace(change=change, rows=weight)
        return Packing(words, ok, Unsent(residual, weight, zeros, 0.0), late)

    def compile(self, state: Global, params: Params, unsent: Unsent) -> None:
        """Runs everything once, so that nobody waits in a round while this worker compiles."""
        words = np.asarray(self.pack(state.params, params, 1.0, unsent, 0, np.uint32(0)).words)
        self._step(state, self._add(jax.tree.map(jnp.zeros_like, state.params), words, np.float32(1), np.int32(0)))
        self.norm(words, 0)
        jax.block_until_ready(self.rebase(state.params, params, params))

    def joined(self, unsent: Unsent, change: Params, rows: float) -> Unsent:
        """Returns what is unsent with one more change of some rows."""
        total = np.float32(unsent.rows + rows)
        shares = np.float32(rows / total), np.float32(unsent.rows / total)
        return unsent._replace(change=self._mean(change, unsent.change, *shares), rows=unsent.rows + rows)

    def _added(self, total: Params, words: jax.Array, share: jax.Array, step: jax.Array) -> Params:
        leaves = self.method.unpack(words, self.layout, step)
        change = jax.tree.unflatten(jax.tree.structure(total), leaves)
        return jax.tree.map(lambda t, x: t + share * x.astype(t.dtype), total, change)

    def _stepped(self, state: Global, mean: Params) -> Global:
        change, outer = self.outer.update(mean, state.outer, state.params)
        return Global(jax.tree.map(lambda a, c: a + c, state.params, change), outer)

    def apply(self, state: Global, manifest: Manifest, words: Sequence[np.ndarray]) -> Global:
        """Takes a round's outer step: by the mean of its payloads, weighted by their rows, in the manifest's order."""
        mean = jax.tree.map(jnp.zeros_like, state.params)
        for member, own_words in zip(manifest.members, words, strict=True):
            share = np.float32(member.header.rows / manifest.rows)
            mean = self._add(mean, own_words, share, np.int32(member.header.base))
        return self._step(state, mean)

    def _norm_of(self, words: jax.Array, step: jax.Array) -> jax.Array:
        leaves = self.method.unpack(words, self.layout, step)
        largest = jnp.stack([jnp.max(jnp.abs(leaf.astype(jnp.float32))) for leaf in leaves if leaf.size]).max()
        unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
        total = sum(jnp.sum(jnp.square(leaf.astype(jnp.float32) / unit)) for leaf in leaves)
        return unit * jnp.sqrt(total)

    def norm(self, words: np.ndarray, number: int) -> float:
        """Returns the L2 norm of the change in a payload that was packed for a round."""
        return float(self._norm(words, np.int32(number)))

    def digest(self, state: Global) -> str:
        """Returns the digest of a global state, 32 hexadecimal digits, computed where its arrays are."""
        digests, mesh = self._digests(state), _mesh_of(state)
        digests = digests if mesh is None else jax.device_put(digests, NamedSharding(mesh, P()))
        return hashlib.sha256(np.asarray(digests).tobytes()).hexdigest()[:32]


def _mesh_of(tree: PyTree) -> Mesh | None:
    """Returns the mesh over which arrays of a tree are sharded; None if there is none."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(tree)]
    meshes = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def _change(anchor: Params, params: Params) -> Params:
    """Returns what must be subtracted from the anchor to get the parameters."""
    return jax.tree.map(lambda a, p: a - widened(p), anchor, params)


def _mean(first: Params, second: Params, of_first: jax.Array, of_second: jax.Array) -> Params:
    """Returns the mean of two changes by their shares; with shares 1 and 0, the first to the bit."""
    return jax.tree.map(lambda x, y: of_first * x + of_second * y, first, second)


def _rebase(anchor: Params, params: Params, sent: Params) -> Params:
    """Returns the anchor with what a worker has changed since it had `sent`; the anchor to the bit if nothing."""
    return jax.tree.map(lambda a, p, s: (a + (widened(p) - widened(s))).astype(p.dtype), anchor, params, sent)


def _fingerprint(outer: optax.GradientTransformation) -> str:
    """Returns a digest of what an optimizer does to a small matrix in two steps: its settings cannot be read."""
    matrix = jnp.asarray(np.linspace(-1, 1, 6).reshape(2, 3), jnp.float32)
    state, changes = outer.init(matrix), b""
    for factor in (0.5, -0.25):
        change, state = outer.update(factor * matrix, state, matrix)
        changes += np.round(np.asarray(change, np.float64), 5).tobytes()
    return hashlib.sha256(changes).hexdigest()[:16]


def number_of(worker: str) -> np.uint32:
    """Returns the number of a worker's name, from which its random rounding is drawn."""
    return np.frombuffer(hashlib.sha256(worker.encode()).digest()[:4], np.uint32)[0]
