"""PowerSGD: low-rank exchange with error feedback."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.checks import Seed, count
from jaxcomm.collectives import axis_size, dense_mean
from jaxcomm.exchange import Exchange, Exchanged, ExchangeState, Gradient, transformation, zeros_unless
from jaxcomm.kernels.numerics import is_finite_narrow
from jaxcomm.kernels.scopes import DECODE, ENCODE
from jaxcomm.kernels.vectors import split_vector
from jaxcomm.layout import BLOCK, Layout, plan_layout
from jaxcomm.types import ExchangeMetrics, Params, PyTree

# A column of P, less its projection on the columns before it, is a rounding error and not a direction if it is shorter
# than this fraction of the longest column. In float32, matrices of rank below r leave 2e-7 to 4e-6.
_DEPENDENT = 1e-5
_TINY = float(np.finfo(np.float32).tiny)  # numbers below it may be flushed to zero
_LIMIT = float(np.finfo(np.float32).max) / 4  # for gradient + residual and for the result: their difference is finite


@dataclass(frozen=True)
class _Group:
    """The matrices of one shape, handled as one stack.

    Attributes:
      n: rows of a matrix.
      m: its columns.
      members: the matrices' indices among the compressed tensors.
      leaves: their indices among all leaves of the tree.
    """

    n: int
    m: int
    members: tuple[int, ...]
    leaves: tuple[int, ...]


class _Run(NamedTuple):
    """Matrices of a stack that are next to each other in the flat vector, too: they are read and written as one.

    Attributes:
      group: the index of their group.
      place: the first one's place in the stack.
      member: its index among the compressed tensors.
      matrices: how many they are.
    """

    group: int
    place: int
    member: int
    matrices: int


@dataclass(frozen=True)
class PowerSgd(Exchange):
    """Sends every matrix as two thin ones, and keeps the rest for later steps (error feedback).

    A tensor of two or more dimensions is a matrix M of n rows and m columns, m its last dimension. One power iteration
    per step approximates it with rank r, starting from the previous step's result (warm start). Each step, on each
    worker, for every matrix (numbered as in Algorithm 1; 2 and the residual are lines 7 and 9 of Algorithm 2):

      2. M = gradient + residual
      3. P = M Q, with the previous step's Q, the same on all workers
      4. P = its mean over the workers
      5. make the columns of P orthonormal, by the Gram-Schmidt process from the first to the last
      6. Q = M^T P
      7. Q = its mean over the workers, kept for the next step
      11. return P Q^T; the residual is M - P Q^T

    Tensors of fewer dimensions, and those with r (n + m) >= n m, are sent dense. Matrices of the same shape are
    stacked, so that a compiled program has one set of products per shape, not per tensor.

    Applied literally in float32, the algorithm is inaccurate for matrices of rank < r and underflows for tiny
    gradients. So columns of Q are scaled to length 1 before use, and no constant is added to a norm: the span of P does
    not depend on the gradient's magnitude. Each column of P is orthogonalised twice against those before it, since one
    pass leaves nearly dependent columns far from orthogonal. A column that is only a rounding error becomes zero, and
    its column of Q is kept: a matrix whose gradient is zero for some steps then continues from there, whereas with
    Q = 0 it would never send again.

    The exchange is also skipped if gradient + residual or the result might exceed a quarter of the largest float32.

    Two ring all-reduces of float32, one of every P and the dense tensors, one of every Q: `metrics.sent`
    counts the numbers of P and Q. Received: 2 (K-1)/K * 4 (sum of r (n + m) + dense elements) bytes. Memory: 4 bytes a
    parameter, and Q: for every group of matrices of one shape, (matrices, m, r) float32, replicated.
    `jc.chain(jc.powersgd(4), optax.sgd(0.1))`.

    Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
    2019, https://arxiv.org/abs/1905.13727, Algorithms 1 and 2. PyTorch's `powerSGD_hook` differs: it sends everything
    densely for the first 1000 steps (`start_powerSGD_iter`), and always every tensor that would not become half as
    large (`min_compression_rate`); a matrix's rows are the tensor's first dimension, where PyTorch has the outputs; it
    also orthogonalises Q, and uses QR above rank 2; it reduces Ps, Qs and dense tensors bucket by bucket, in the
    gradient's type.

    Attributes:
      rank: r, columns of P and Q. The paper trains with 1, 2 and 4.
      dense_below: tensors with fewer elements are sent dense, as float32.
      seed: seed of the first Q: one draw of standard normal numbers, `jax.random.normal(jax.random.key(seed), ...)`, is
        divided among the matrices in tree order. It is the same on every worker and in every process.
    """

    rank: Annotated[int, count(1, "1 sends least, 2 and 4 are usual, plump_dp sends everything")] = 4
    _: KW_ONLY
    dense_below: Annotated[int, count(0, "0 leaves it to the rank which tensors are compressed")] = 512
    seed: Seed = 0

    needs_matrices: ClassVar[bool] = True

    def plan(self, tree: PyTree) -> Layout:
        def pays(shape: tuple[int, ...]) -> bool:
            return len(shape) >= 2 and self.rank * sum(_matrix_shape(shape)) < math.prod(shape)

        return plan_layout(tree, dense_below=self.dense_below, capacity=lambda n: n, compress=pays)

    def first_memory(self, params: Params, layout: Layout) -> tuple[jax.Array, ...]:
        return tuple(_first_stacks(_groups(layout), self.rank, self.seed))

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, tuple[jax.Array, ...]]:
        layout, residual, old_q = gradient.layout, gradient.residual, state.memory
        groups = _groups(layout)
        _check_q(old_q, groups, self.rank)
        inside, dense = layout.split(gradient.leaves)
        assert residual is not None, "powersgd keeps a residual"
        if not groups:
            means, ok = dense_mean(dense, self.axis_name)
            return Exchanged(zeros_unless(ok, means), residual, ExchangeMetrics.of(ok, sent=0)), old_q

        runs = _runs(groups)
        x = _accumulated(inside, residual[0], layout, groups, runs)
        with jax.named_scope(ENCODE):
            p = [_matmul("bnm,bmr->bnr", *pair) for pair in zip(x, _by_rows(_unit_columns, old_q), strict=True)]
        # A number out of range may be multiplied by zero and not show in P. A NaN in P tells all workers, by the sum.
        in_range = jnp.stack([(jnp.abs(stack) <= _LIMIT).all() for stack in x]).all()
        (p_mean, *dense), p_ok = dense_mean([jnp.where(in_range, _join(p), jnp.nan), *dense], self.axis_name)
        with jax.named_scope(ENCODE):
            p = _by_rows(_orthonormal, _cut(p_mean, p))
            # As (matrices, r, m): XLA for CPUs would fold a transposition into the product, and take 20 times as long.
            q = [_matmul("bnr,bnm->brm", *pair) for pair in zip(p, x, strict=True)]
        (q_mean,), q_ok = dense_mean([_join(q)], self.axis_name)
        in_range = (jnp.abs(q_mean) <= _LIMIT / self.rank).all()  # and with it P Q^T, since no number of P exceeds 1
        q = _cut(q_mean, q)
        with jax.named_scope(DECODE):
            result = [_matmul("bnr,brm->bnm", *pair) for pair in zip(p, q, strict=True)]
        means = [mean.reshape(tensor.shape) for mean, tensor in zip(_unstack(result, groups), inside, strict=True)]
        means = layout.as_leaves(means)
        ok = p_ok & q_ok & in_range & is_finite_narrow(means)

        errors = _in_runs([a - b for a, b in zip(x, result, strict=True)], groups, runs)
        new_residual = jnp.where(ok, layout.flatten(errors)[None], residual)
        metrics = ExchangeMetrics.of(ok, sent=axis_size(self.axis_name) * (p_mean.size + q_mean.size))
        out = Exchanged(zeros_unless(ok, layout.join(means, dense)), new_residual, metrics)
        return out, tuple(_renew(ok, new.mT, old) for new, old in zip(q, old_q, strict=True))


powersgd = transformation(PowerSgd)


def _first_stacks(groups: Sequence[_Group], rank: int, seed: int) -> list[jax.Array]:
    """Returns the Q of every group's matrices, from which their power iteration starts: (matrices, m, r) each."""
    columns = sorted((leaf, group.m) for group in groups for leaf in group.leaves)
    ends = itertools.accumulate((rank * m for _, m in columns), initial=0)
    starts = dict(zip((leaf for leaf, _ in columns), ends, strict=False))
    numbers = jax.random.normal(jax.random.key(seed), (rank * sum(m for _, m in columns),), jnp.float32)

    def stack(group: _Group) -> jax.Array:
        at = np.array([starts[leaf] for leaf in group.leaves], np.int32)
        rows = jax.vmap(lambda start: lax.dynamic_slice(numbers, (start,), (group.m * rank,)))(at)
        return rows.reshape(-1, group.m, rank)

    return [stack(group) for group in groups]


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns (n, m) of a tensor of two or more dimensions."""
    return math.prod(shape[:-1]), shape[-1]


def _groups(layout: Layout) -> list[_Group]:
    """Groups the compressed tensors by the shape of their matrix, in the order in which shapes first occur."""
    by_shape: dict[tuple[int, int], list[tuple[int, int]]] = {}
    leaves = [leaf for leaf, is_in in enumerate(layout.compressed) if is_in]
    for member, leaf in enumerate(leaves):
        by_shape.setdefault(_matrix_shape(layout.shapes[leaf]), []).append((member, leaf))
    return [_Group(*shape, *zip(*pairs, strict=True)) for shape, pairs in by_shape.items()]


def _check_q(q: Sequence[jax.Array], groups: Sequence[_Group], rank: int) -> None:
    """Refuses a state that was made for other matrices or another rank."""
    expected, shapes = [(len(group.members), group.m, rank) for group in groups], [stack.shape for stack in q]
    if expected != shapes:
        raise ValueError(
            f"A state of powersgd must have a Q for every shape of matrices, {expected} for this gradient and rank; "
            f"got {shapes}. Initialise the state with the parameters and the rank that are trained."
        )


def _runs(groups: Sequence[_Group]) -> list[_Run]:
    """Returns the runs of all groups, in the order of the flat vector."""
    runs = list[_Run]()
    for index, group in enumerate(groups):
        for place, member in enumerate(group.members):
            is_next = place > 0 and group.members[place - 1] == member - 1 and group.n * group.m % BLOCK == 0
            last = runs.pop() if is_next else _Run(index, place, member, 0)
            runs.append(last._replace(matrices=last.matrices + 1))
    return sorted(runs, key=lambda run: run.member)


def _accumulated(
    tensors: Sequence[jax.Array], residual: jax.Array, layout: Layout, groups: Sequence[_Group], runs: Sequence[_Run]
) -> list[jax.Array]:
    """Returns every group's tensors + residual (n,), as stacks: (matrices, n, m) each."""
    shapes = [(run.matrices, groups[run.group].n, groups[run.group].m) for run in runs]
    owed = split_vector(residual, shapes, [layout.starts[run.member] for run in runs])
    parts: list[list[jax.Array]] = [[] for _ in groups]
    for run, shape, error in zip(runs, shapes, owed, strict=True):
        matrices = [tensor.reshape(1, *shape[1:]) for tensor in tensors[run.member : run.member + run.matrices]]
        parts[run.group].append(jnp.concatenate(matrices).astype(jnp.float32) + error)
    return [jnp.concatenate(stack) for stack in parts]


def _in_runs(stacks: Sequence[jax.Array], groups: Sequence[_Group], runs: Sequence[_Run]) -> list[jax.Array]:
    """Cuts stacks into the vectors of the runs."""
    vectors = dict[_Run, jax.Array]()
    for index, (stack, group) in enumerate(zip(stacks, groups, strict=True)):
        members, size = [run for run in runs if run.group == index], group.n * group.m
        parts = split_vector(
            stack.reshape(-1), [(run.matrices * size,) for run in members], [run.place * size for run in members]
        )
        vectors |= zip(members, parts, strict=True)
    return [vectors[run] for run in runs]


def _unstack(stacks: Sequence[jax.Array], groups: Sequence[_Group]) -> list[jax.Array]:
    """Puts the matrices of all stacks into the order of the compressed tensors."""
    matrices = {}
    for stack, group in zip(stacks, groups, strict=True):
        parts = split_vector(stack.reshape(-1), [(group.n, group.m)] * len(group.members))
        matrices |= zip(group.members, parts, strict=True)
    return [matrices[place] for place in range(len(matrices))]


def _join(stacks: Sequence[jax.Array]) -> jax.Array:
    """Lays arrays out as one vector."""
    return jnp.concatenate([stack.reshape(-1) for stack in stacks])


def _cut(vector: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Cuts a vector into arrays of given shapes; the inverse of `_join`."""
    ends = np.cumsum([stack.size for stack in like])
    return [part.reshape(stack.shape) for part, stack in zip(jnp.split(vector, ends[:-1]), like, strict=True)]


def _by_rows(function: Callable[[jax.Array], jax.Array], stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """Applies a function to stacks of thin matrices, at once to all stacks with the same number of rows."""
    places: dict[int, list[int]] = {}
    for place, stack in enumerate(stacks):
        places.setdefault(stack.shape[1], []).append(place)
    out = list(stacks)
    for group in places.values():
        ends = np.cumsum([len(stacks[place]) for place in group])
        parts = jnp.split(function(jnp.concatenate([stacks[place] for place in group])), ends[:-1])
        for place, part in zip(group, parts, strict=True):
            out[place] = part
    return out


def _matmul(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies in float32; accelerators use fewer bits by default."""
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def _to_range(stack: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Scales to a largest magnitude of 1 along an axis, so that no square overflows; tiny ones become 0."""
    largest = jnp.max(jnp.abs(stack), axis=axis, keepdims=True)
    return jnp.where(largest >= _TINY, stack / jnp.maximum(largest, _TINY), 0.0)


def _lengths(stack: jax.Array) -> jax.Array:
    """Returns the lengths of the columns of (matrices, rows, columns): (matrices, 1, columns)."""
    return jnp.sqrt(jnp.sum(stack * stack, axis=1, keepdims=True))


def _scaled(columns: jax.Array, min_length: jax.Array | float) -> jax.Array:
    """Scales columns to length 1; columns of length `min_length` or less become zero."""
    length = _lengths(columns)
    is_long = length > min_length
    return jnp.where(is_long, columns / jnp.where(is_long, length, 1.0), 0.0)


def _unit_columns(q: jax.Array) -> jax.Array:
    """Scales the columns of matrices (matrices, m, r) to length 1."""
    return _scaled(_to_range(q, axis=1), 0.0)


def _orthonormal(p: jax.Array) -> jax.Array:
    """Makes the columns of (matrices, n, r) orthonormal; a column that depends on those before it becomes zero."""
    p = _to_range(p, axis=(1, 2))
    min_length = _DEPENDENT * jnp.max(_lengths(p), axis=2, keepdims=True)  # (matrices, 1, 1)

    def project(i: jax.Array, p: jax.Array) -> jax.Array:
        is_before = jnp.arange(p.shape[2], dtype=jnp.int32) < i
        column = lax.dynamic_slice_in_dim(p, i, 1, axis=2)  # (matrices, n, 1)
        for _ in range(2):
            overlap = jnp.sum(jnp.where(is_before, p * column, 0.0), axis=1, keepdims=True)  # (matrices, 1, r)
            column = column - jnp.sum(p * overlap, axis=2, keepdims=True)
        return lax.dynamic_update_slice_in_dim(p, _scaled(column, min_length), i, axis=2)

    return lax.fori_loop(0, p.shape[2], project, p)


def _renew(ok: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the new Q, but the old column where the new one is zero: no iteration would ever leave zero."""
    is_direction = jnp.max(jnp.abs(new), axis=1, keepdims=True) >= _TINY
    return jnp.where(ok & is_direction, new, old)
