"""A small network with a convolution and two dense layers, written for each way to train it sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks.dense_ways import on_one_worker, rows_of_one_worker
from jaxcomm.layers.split_dense import split_dense
from tests.jaxcomm.train_steps import init_state

ROWS, PIXELS, FEATURES, HIDDEN, CLASSES = 8, 8, 64, 64, 16


def params():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32)

    return {
        "bottom": {"kernel": normal(PIXELS, FEATURES)},
        "down": {"bias": normal(CLASSES), "kernel": normal(HIDDEN, CLASSES)},
        "up": {"bias": normal(HIDDEN), "kernel": normal(FEATURES, HIDDEN)},
    }


def batches(count):
    rng = np.random.default_rng(1)
    for _ in range(count):
        yield {
            "image": rng.normal(size=(ROWS, 2, 2, 2)).astype(np.float32),
            "label": rng.normal(size=(ROWS, CLASSES)).astype(np.float32),
        }


def bottom(params, image):
    """A convolution over the whole image: (B, 2, 2, 2) to (B, FEATURES)."""
    numbers, kernel = ("NHWC", "HWIO", "NHWC"), params["bottom"]["kernel"].reshape(2, 2, 2, FEATURES)
    y = lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=numbers)
    return jnp.tanh(y).reshape(image.shape[0], FEATURES)


def top(params, features):
    hidden = jnp.tanh(features @ params["up"]["kernel"] + params["up"]["bias"])
    return hidden @ params["down"]["kernel"] + params["down"]["bias"]


def error(y, batch):
    return jnp.mean((y - batch["label"]) ** 2)


def whole(params, batch):
    """For one device, or for the compiler to partition."""
    return error(top(params, bottom(params, batch["image"])), batch)


def split(params, batch):
    """Dense layers sharded over the workers."""
    up, down = params["up"], params["down"]
    features = bottom(params, batch["image"])
    hidden = jnp.tanh(split_dense(features, up["kernel"], up["bias"], outputs="features"))
    return error(split_dense(hidden, down["kernel"], down["bias"], inputs="features"), batch)


def split_global(params, batch):
    """The same, with the loss of all rows on every worker."""
    return lax.pmean(split(params, batch), "data")


def on_one(params, batch):
    """Dense layers only on worker 0."""
    features = bottom(params, batch["image"])

    def loss(dense, inputs):
        return error(top(dense, inputs["features"]), inputs)

    inputs = {"features": features, "label": batch["label"]}
    return on_one_worker(loss, {"up": params["up"], "down": params["down"]}, inputs)


def tensor_parallel(params, batch):
    """Dense layers sharded over a model axis, by hand."""
    up, down = params["up"], params["down"]
    hidden = jnp.tanh(bottom(params, batch["image"]) @ up["kernel"] + up["bias"])
    return error(lax.psum(hidden @ down["kernel"], "model") + down["bias"], batch)


def explicit(params, batch):
    """The same on a mesh of Explicit axes, with shardings in the types; by a product, as convolutions have none."""

    def spread(bias, y):
        return jax.reshard(jnp.broadcast_to(bias, y.shape), jax.typeof(y).sharding)

    up, down = params["up"], params["down"]
    features = jnp.tanh(batch["image"].reshape(ROWS, PIXELS) @ params["bottom"]["kernel"])
    hidden = features @ up["kernel"]
    hidden = jnp.tanh(hidden + spread(up["bias"], hidden))
    y = jnp.einsum("bh,ho->bo", hidden, down["kernel"], out_sharding=P("data"))
    return error(y + spread(down["bias"], y), batch)


OVER_WORKERS = {
    "bottom": P(),
    "up": {"kernel": P(None, "data"), "bias": P("data")},
    "down": {"kernel": P("data"), "bias": P("data")},
}
OVER_MODEL = {
    "bottom": P(),
    "up": {"kernel": P(None, "model"), "bias": P("model")},
    "down": {"kernel": P("model"), "bias": P()},
}
ONE = {"bottom": P(), "up": P("data"), "down": P("data")}


def auto_mesh(data, model=None):
    return jc.make_mesh(data=data) if model is None else jc.make_mesh(data=data, model=model)


def explicit_mesh(data, model):
    return jax.make_mesh((data, model), ("data", "model"), devices=jax.devices()[: data * model])


def make(loss_fn, tx, mesh, specs, **options):
    return jc.make_train_step(loss_fn, tx, mesh, specs=specs, **options)


def partitioned(loss_fn, tx, mesh, specs, **options):
    return make(loss_fn, tx, mesh, specs, auto=("model",), **options)


def as_given(loss_fn, tx, mesh, specs, **options):
    """A step for parameters that are sharded already, and a loss for one device."""
    return jc.make_train_step(loss_fn, tx, mesh, **options)


# name: (the step's maker, its loss, specs, mesh)
WAYS = {
    "split": (make, split, OVER_WORKERS, lambda: auto_mesh(4)),
    "split, one loss": (make, split_global, OVER_WORKERS, lambda: auto_mesh(2)),
    "one worker": (make, on_one, ONE, lambda: auto_mesh(2)),
    "tensor parallel": (make, tensor_parallel, OVER_MODEL, lambda: auto_mesh(2, 2)),
    "partitioned": (partitioned, whole, OVER_MODEL, lambda: auto_mesh(2, 2)),
    "as given": (as_given, whole, OVER_MODEL, lambda: auto_mesh(2, 2)),
    "unreduced": (partitioned, explicit, OVER_MODEL, lambda: explicit_mesh(2, 2)),
}


def start(name, workers):
    """The initial parameters for a way."""
    if name != "one worker":
        return params()
    first = params()
    return {**first, **rows_of_one_worker({"up": first["up"], "down": first["down"]}, workers)}


def trained(name, tx, count):
    """Takes steps in one way: (state, metrics of the last step). A step must not change the state's shardings."""
    make_way, loss_fn, specs, mesh = WAYS[name]
    mesh = mesh()
    state = init_state(start(name, mesh.shape["data"]), tx, mesh, specs=specs)
    step = compiled(make_way(loss_fn, tx, mesh, specs), state)
    metrics = {}
    for batch in batches(count):
        state, metrics = step(state, on(mesh, batch))
    return state, metrics


def compiled(step, state):
    """The step for a state, compiled quickly; batches come from `on`."""
    mesh = state.step.sharding.mesh
    return step.lower(state, on(mesh, next(batches(1)))).compile()


def on(mesh, batch):
    """A batch on a mesh, each worker with its rows."""
    return jax.device_put(batch, NamedSharding(mesh, P("data")))


def trained_on_one_device(tx, count, times=1):
    """The parameters after steps on one device with all rows, whose labels are multiplied."""
    params_ = params()
    state = tx.init(params_)

    @jax.jit
    def step(params_, state, batch):
        updates, state = tx.update(jax.grad(whole)(params_, batch), state, params_)
        return optax.apply_updates(params_, updates), state

    for batch in batches(count):
        params_, state = step(params_, state, batch | {"label": times * batch["label"]})
    return params_
