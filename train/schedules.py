"""Learning rates by step."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import optax

from configs.experiment import Experiment


def make_schedule(experiment: Experiment) -> optax.Schedule:
    """Makes the learning rate of an experiment: a linear warm-up, then its schedule.

    - cosine: falls to zero at the last step.
    - drops: falls by 10 at every step of `drop_at`, counted from the start.
    - polynomial: the peak times the square root of the fraction of steps that are left (GoogLeNet's in Caffe).
    - inverse_sqrt: the peak times sqrt(warmup_steps / step) (fairseq's; Vaswani et al., 2017).
    - constant.
    """
    peak, warmup = experiment.learning_rate, experiment.warmup_steps
    if experiment.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0 if warmup else peak, peak_value=peak, warmup_steps=warmup, decay_steps=experiment.steps
        )
    decay_steps = max(experiment.steps - warmup, 1)
    match experiment.schedule:
        case "drops":
            after = optax.piecewise_constant_schedule(peak, {step - warmup: 0.1 for step in experiment.drop_at})
        case "polynomial":
            after = optax.polynomial_schedule(peak, 0.0, power=0.5, transition_steps=decay_steps)
        case "inverse_sqrt":
            after = partial(_inverse_sqrt, peak, max(warmup, 1))
        case _:
            after = optax.constant_schedule(peak)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def _inverse_sqrt(peak: float, start: int, count: Any) -> Any:
    return peak * (start / jnp.maximum(start + count, 1)) ** 0.5  # a joined schedule is also evaluated before its start
