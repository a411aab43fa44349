"""What DGC and importance weighted pruning do before and after the selection: the momentum of a sparse exchange.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training" (ICLR 2018), sections 3.2 and 3.3. For one of K workers, with its gradient g, its velocity
u, its accumulated velocity v (the residual, of which the exchange sends a part) and momentum m:

    local clipping       g = g * min(1, clip * sqrt(K) / norm), norm = |g| over all of its tensors
    momentum correction  u = m * u + g;  v = v + u                                     (Equation 7)
    factor masking       v = 0 and u = 0 where v was sent
    warm-up              the fraction that is sent falls exponentially, from step to step, to its
                         final value

The exchange replaces a momentum optimizer: what it returns is to be applied by plain SGD.

Where the paper is silent:

- A tensor which goes dense has one velocity, the same on every worker: u = m * u + mean of the g,
  which is what every worker receives. Its gradient counts in the norm and is clipped.
- The paper's gradients are divided by K before they are clipped, at K^-1/2 of the bound, and added up
  (Equation 3). Here they are clipped as they come, at K^1/2 of it, and the exchange divides by K: `clip`
  is the bound of their mean. A norm of 0 leaves them as they are. The norm and the factor are computed in
  float64, in which no square of a float32 overflows, and the factor is rounded to float32. What
  clipping makes smaller than 2^-126 of clip * sqrt(K) becomes zero, as on processors for which such
  numbers of float32 are zero.
- A step is skipped if a gradient, a v, or what the workers would receive is not finite, or if a new u
  of a compressed tensor holds a number of 2^100 or more. Then no velocity changes; the count of the
  steps goes on.
- Warm-up: step k of `warmup_steps`, counted from 0, keeps density^((k + 1) / (warmup_steps + 1)).
  With a final density of 0.1 % and four steps these are the paper's 25 %, 6.25 %, 1.56 % and 0.4 %.
"""

import math

import numpy as np

from .common import Tensors, add_residuals


def clip_locally(gradients: list[Tensors], clip: float | None) -> list[Tensors]:
    """Each worker's gradient, in float32, with a norm of at most clip * sqrt(K); None clips nothing.

    Args:
        gradients: per worker, all of its tensors; finite.
        clip: the norm at which the workers' mean gradient would be clipped.
    """
    clipped = []
    for gradient in gradients:
        factor, least = np.float32(1), 0.0
        squares = sum(float(np.sum(np.square(np.asarray(g, np.float64)))) for g in gradient.values())
        if clip is not None and squares > 0:
            bound = clip * math.sqrt(len(gradients))
            factor, least = np.float32(min(1.0, bound / math.sqrt(squares))), bound * 2.0**-126
        clipped.append({name: flushed(np.asarray(g, np.float32) * factor, least) for name, g in gradient.items()})
    return clipped


def flushed(x: np.ndarray, least: float) -> np.ndarray:
    """x, with zeros for numbers of smaller magnitude."""
    return np.where(np.abs(x) < least, np.float32(0), x)


def correct_momentum(
    gradients: list[Tensors], velocities: list[Tensors], residuals: list[Tensors], momentum: float
) -> tuple[list[Tensors], list[Tensors]]:
    """The two accumulations: u = momentum * u + g, then v = v + u.

    Args:
        gradients: per worker, its clipped gradient.
        velocities: per worker, u by name; compressed tensors only.
        residuals: per worker, v by name; compressed tensors only.
        momentum: the momentum m.

    Returns:
        (per worker, the new u, of all compressed tensors; per worker, the new v, and the gradient itself
        where the tensor goes dense). Either may be infinite.
    """
    decayed = [{name: np.asarray(np.float32(momentum) * u) for name, u in own.items()} for own in velocities]
    sums = add_residuals(gradients, decayed)
    new_velocities = [{name: own[name] for name in u} for own, u in zip(sums, velocities, strict=True)]
    return new_velocities, add_residuals(sums, residuals)


def mask_factors(velocities: list[Tensors], all_chosen: list[dict[str, np.ndarray]]) -> list[Tensors]:
    """Each worker's u, with 0 where it sent its v: `all_chosen` holds those coordinates, as flat indices by name."""
    masked = []
    for own, chosen in zip(velocities, all_chosen, strict=True):
        factors = {}
        for name, u in own.items():
            flat = np.array(u, np.float32).reshape(-1)  # (N,)
            flat[chosen[name]] = 0
            factors[name] = flat.reshape(u.shape)
        masked.append(factors)
    return masked


def add_dense_momentum(mean: Tensors, momentum_dense: Tensors, momentum: float) -> Tensors:
    """The new u of the tensors which go dense: momentum * u + the workers' mean; it may be infinite."""
    with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for inf, nan
        return {name: np.asarray(np.float32(momentum) * u + mean[name]) for name, u in momentum_dense.items()}


def kept_fraction(density: float, k: int, warmup_steps: int) -> np.float32:
    """The fraction of the coordinates which step k of the warm-up sends."""
    return np.float32(density ** ((k + 1) / (warmup_steps + 1)))


def warmup_slots(fraction: np.float32, n: int, final: int) -> int:
    """How many of n coordinates a warm-up step sends: floor(fraction * n) in float32, from `final` to n."""
    return max(final, min(n, math.floor(fraction * np.float32(n))))
