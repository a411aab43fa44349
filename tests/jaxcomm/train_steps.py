"""Steps on a mesh or simulated, and the first state for tests that make their own steps."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxcomm as jc

KINDS = ("mesh", "simulated")


def make_step(kind, loss, tx, *, workers, **arguments):
    """A step of K workers, of one of the `KINDS`."""
    if kind == "mesh":
        return jc.make_train_step(loss, tx, jc.make_mesh(data=workers), **arguments)
    return jc.simulate(loss, tx, workers, **arguments)


def linear(params, batch):
    """A loss whose gradient is the mean of the batch's rows."""
    return sum((jnp.sum(leaf * batch[name].mean(0)) for name, leaf in params.items()), jnp.zeros(()))


def normal(shapes, seed=0, *leading, dtype=np.float32):
    """Normal numbers of shapes by name, after leading dimensions such as a batch's rows."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(*leading, *shape)).astype(dtype) for name, shape in shapes.items()}


def init_state(params, tx, workers, *, axis_name="data", model_state=(), specs=None):
    """The state of K workers, simulated or on a mesh."""

    def loss(*_):
        raise AssertionError("nobody takes a step")

    if isinstance(workers, Mesh):
        step = jc.make_train_step(loss, tx, workers, specs=specs, axis_name=axis_name)
    else:
        step = jc.simulate(loss, tx, workers, axis_name=axis_name)
    return step.init(params, model_state)


def repeated(tx, gradient, count):
    """The state, and the sum of overflow, after a step of zeros and `count` simulated steps of one gradient (K, n)."""
    K, n = gradient.shape
    step = jc.simulate(lambda params, rows: jnp.mean(rows @ params["w"]), tx, K)
    state, overflow = init_state({"w": jnp.zeros(n)}, tx, K), 0
    state, _ = step(state, np.zeros_like(gradient))
    for _ in range(count):
        state, metrics = step(state, gradient)
        overflow += metrics["overflow"]
    return state, overflow


def state_shapes(params, tx, mesh, specs, **options):
    """The shapes and shardings of that state for sharded parameters."""
    return jc.make_train_step(lambda *_: 0.0, tx, mesh, specs=specs).shapes(params, **options)


def warnings_of(tx, params, workers, **options):
    """The warnings of `init`, or the error that it raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(lambda: init_state(params, tx, workers, **options))
    return [str(warning.message) for warning in caught]
