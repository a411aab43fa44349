"""Slim-DP in NumPy: an oracle of the tests.

Algorithm 1 of Sun et al., "Slim-DP: A Light Communication Data Parallelism for DNN" (AAAI 2018),
sections 3.2 and 3.3. The model has n coordinates. The core, the beta * n most significant ones, is the
same for all; the explorer of a worker is some (alpha - beta) * n others. The paper's lines are not
numbered; in its order they are, for worker k and communication t = 0, 1, ...:

     1:  w_k = Pull(w)
     2:  until convergence
     3:      delta_k = LocalTrain(w_k, D_k, p), the sum of p local updates
     4:      explorer_k = Exploration(all but the core, alpha - beta)
     5:      if q divides t + 1 then
     6:          Push(delta_k), all of it
     7:      else
     8:          Push(delta_k on the core and explorer_k)
     9:      pulled = Pull(w on the core and explorer_k)
    10:      w_k = Merge(w_k, pulled)

and for the parameter server, which holds the global model w:

    11:  initialize w, t = 0
    12:  until convergence
    13:      w = Update(w, what was pushed)
    14:      t = t + 1
    15:      if q divides t then
    16:          core = Core-Selection(w, delta_k, beta): the largest S = |w| + c * |g|

Where the paper is silent:

- The n coordinates are those of all tensors, flat in C order, in the sorted order of their names.
- The core has round(beta * n) coordinates. The first one, before any delta is known, holds the largest
  |w|. Of equally significant coordinates those of the lowest index enter.
- Line 3: the local optimizer is outside; it gives what it would add to w_k.
- Line 4: each worker is the server of a part of the coordinates outside of the core, and a worker explores
  the same number, e = round((alpha - beta) * n / K), of every part; fewer if the smallest part is smaller.
  A part is cut into e strata, as equal as possible, from a random coordinate of it on, wrapping around,
  and one coordinate is drawn from each: of z coordinates, each with probability e / z. The paper's
  Exploration is a uniform random choice too, but without servers' parts and strata.
- Line 13: w gains server_rate * the sum of what was pushed, coordinate by coordinate, over the workers that
  pushed it. The paper's eta' is server_rate, by default 1 / K.
- Line 16: g is the mean over the workers of the delta_k just pushed. c makes the means of |w| and of c * |g|
  equal, unless it is given.
- What becomes of delta_k outside of what was pushed: "local" drops it, so that it stays in w_k alone: the
  paper's delta_k is that of the last p steps; "carry" keeps it, to be pushed later.
- Line 9 pulls the core and the explorer even where line 6 pushed everything, as the paper writes. With
  alpha = 1 everything is pushed and pulled at every communication.
- A communication is skipped if it meets a non-finite number in a delta_k, in the new w or in a new w_k: w
  stays, and the updates of this call are undone in every w_k and delta_k. t goes on. A new core which was due
  is due, with line 6, at the next communication which is not skipped; later ones stay at the multiples of q.
- In a call without a communication a worker ignores an update which would leave a non-finite number in its
  w_k or delta_k.
"""

import itertools
from collections.abc import Callable

import numpy as np

from .common import Tensors


class SlimDpReference:
    """K synchronous workers and the parameter server between them.

    Args:
        params: the initial parameters, the same on every worker.
        K: the number of workers.
        alpha: the fraction of the coordinates which is communicated.
        beta: the fraction which is the core.
        q: the communications between two choices of the core.
        uniform: uniform(t, k) is (K * e,) draws from [0, 1) for worker k's explorer at communication t; e of part 0
            first. It is not called if there is no explorer.
        offsets: offsets(t, k, sizes) is, for each part of `sizes` coordinates, the coordinate from 0 at which the
            first stratum of worker k's explorer begins. It is not called if there is no explorer.
        p: the local steps between two communications.
        c: the weight of |g| in the significance; None for mean|w| / mean|g|.
        server_rate: what the sum of the pushed updates is multiplied by; None for 1 / K.
        unsent: "local" or "carry", what becomes of the updates that were not pushed.

    Attributes:
        params: per worker, its local model.
        global_model: the parameter server's model.
        core: the core's flat indices, sorted.
        deltas: per worker, (n,), the updates since the last communication; with "carry", all that were not pushed.
        core_size: the coordinates of the core.
        explorer_size: e, the coordinates which each worker explores in each part.
    """

    def __init__(
        self,
        params: Tensors,
        K: int,
        *,
        alpha: float,
        beta: float,
        q: int,
        uniform: Callable[[int, int], np.ndarray],
        offsets: Callable[[int, int, list[int]], np.ndarray],
        p: int = 1,
        c: float | None = None,
        server_rate: float | None = None,
        unsent: str = "local",
    ):
        if unsent not in ("local", "carry"):
            raise ValueError(f'unsent must be "local" or "carry", not {unsent}.')
        self.shapes = {name: np.shape(params[name]) for name in sorted(params)}
        self.K = K
        self.alpha = alpha
        self.p = p
        self.q = q
        self.c = c
        self.server_rate = np.float32(1 / K if server_rate is None else server_rate)
        self.unsent = unsent
        self.uniform = uniform
        self.offsets = offsets
        self.calls = 0
        self.t = 0
        self.core_due = False

        # 11 and 1
        self.w = self._flat(params)  # (n,), the global model
        self.local = [self.w] * K  # per worker, (n,)
        self.deltas = [np.zeros_like(self.w)] * K
        n = self.w.size
        self.core_size = round(beta * n)
        self.explorer_size = min(round((alpha - beta) * n / K), (n - self.core_size) // K)
        self.core = largest(np.abs(self.w), self.core_size)

    @property
    def params(self) -> list[Tensors]:
        return [self._unflat(w) for w in self.local]

    @property
    def global_model(self) -> Tensors:
        return self._unflat(self.w)

    def step(self, updates: list[Tensors]) -> bool:
        """Add the workers' local updates, one dict for each worker, and communicate if it is time.

        Returns:
            Whether there was a communication and it was skipped.
        """
        # 3: local training
        flat_updates = [self._flat(update) for update in updates]
        with np.errstate(over="ignore", invalid="ignore"):  # looked at below
            local = [w + update for w, update in zip(self.local, flat_updates, strict=True)]
            deltas = [delta + update for delta, update in zip(self.deltas, flat_updates, strict=True)]

        self.calls += 1
        if self.calls % self.p != 0:
            for k in range(self.K):
                if finite([local[k], deltas[k]]):
                    self.local[k], self.deltas[k] = local[k], deltas[k]
            return False
        with np.errstate(over="ignore", invalid="ignore"):
            return self._communicate(local, deltas)

    def _communicate(self, local: list[np.ndarray], deltas: list[np.ndarray]) -> bool:
        """Lines 4 to 16; whether the communication was skipped."""
        n = self.w.size
        everything = np.arange(n)

        # 5: does q divide t + 1, or did it at a communication which was skipped?
        if (self.t + 1) % self.q == 0:
            self.core_due = True

        # 4: what each worker communicates
        communicated = []
        for k in range(self.K):
            if self.alpha == 1:
                communicated.append(everything)
            else:
                communicated.append(np.concatenate([self.core, self._explorer(self.t, k)]))
        self.t += 1

        # 6, 8 and 13: push
        pushed = [everything if self.core_due else communicated[k] for k in range(self.K)]
        total = np.zeros(n, np.float32)
        for k in range(self.K):
            total[pushed[k]] += deltas[k][pushed[k]]
        w = self.w + self.server_rate * total

        # 9 and 10: pull and merge
        merged = [w_k.copy() for w_k in local]
        for k in range(self.K):
            merged[k][communicated[k]] = w[communicated[k]]

        if not finite([*deltas, w, *merged]):
            return True
        self.w, self.local = w, merged

        # what was not pushed
        for k in range(self.K):
            self.deltas[k] = np.zeros(n, np.float32) if self.unsent == "local" else deltas[k].copy()
            self.deltas[k][pushed[k]] = 0

        # 16: a new core
        if self.core_due:
            self.core = largest(self._significance(w, total / np.float32(self.K)), self.core_size)
            self.core_due = False
        return False

    def _explorer(self, t: int, k: int) -> np.ndarray:
        """Line 4: the flat indices which worker k explores at communication t, (K * e,), part by part."""
        e = self.explorer_size
        if e == 0:
            return np.zeros(0, np.int64)
        u = np.asarray(self.uniform(t, k), np.float32)  # (K * e,)
        others = np.setdiff1d(np.arange(self.w.size), self.core)  # (m,), ascending
        m = others.size
        starts = [start_of(j, m, self.K) for j in range(self.K + 1)]
        sizes = [end - start for start, end in itertools.pairwise(starts)]
        offsets = self.offsets(t, k, sizes)
        ranks = []
        for j, z in enumerate(sizes):
            for i in range(e):
                start = start_of(i, z, e)
                width = start_of(i + 1, z, e) - start
                draw = int(np.floor(u[j * e + i] * np.float32(width)))
                ranks.append(starts[j] + (start + min(draw, width - 1) + int(offsets[j])) % z)
        return others[ranks]

    def _significance(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        """S of equation 1, (n,)."""
        w, g = np.abs(w), np.abs(g)
        if self.c is not None:
            c = np.float32(self.c)
        elif g.mean() == 0:
            c = np.float32(0)
        else:
            c = w.mean() / g.mean()
        return w + c * g

    def _flat(self, tensors: Tensors) -> np.ndarray:
        """All tensors as one vector, (n,)."""
        return np.concatenate([np.asarray(tensors[name], np.float32).reshape(-1) for name in self.shapes])

    def _unflat(self, flat: np.ndarray) -> Tensors:
        """The vector as tensors."""
        tensors, start = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            tensors[name] = flat[start : start + size].reshape(shape).copy()
            start += size
        return tensors


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """The flat indices of the `count` largest values, sorted; of equal ones those of the lowest index."""
    descending = np.argsort(-values, kind="stable")
    return np.sort(descending[:count])


def start_of(i: int, size: int, parts: int) -> int:
    """Where part i starts if `size` is cut into parts as equal as possible, the larger ones first."""
    return i * (size // parts) + min(i, size % parts)


def finite(arrays: list[np.ndarray]) -> bool:
    """Whether every number is finite."""
    return all(np.isfinite(array).all() for array in arrays)
