"""A small twin of every model, and batches for them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.alexnet import AlexNet
from models.cnn import Cnn
from models.dlrm import Dlrm
from models.googlenet import GoogLeNet
from models.gpt import Gpt
from models.mlp import Mlp
from models.resnet import ResNet
from models.transformer import Transformer
from models.vgg import Vgg

IMAGE = (8, 8, 3)
CLASSES = 5
INCEPTION = (2, 3, 4, 2, 2, 2)
TABLES = (5, 7, 3)


def images(rows):
    rng = np.random.default_rng(0)
    return {
        "image": rng.normal(size=(rows, *IMAGE)).astype(np.float32),
        "label": rng.integers(0, CLASSES, rows).astype(np.int32),
    }


def clicks(rows):
    rng = np.random.default_rng(0)
    return {
        "dense": rng.normal(size=(rows, 13)).astype(np.float32),
        "categories": rng.integers(0, TABLES, (rows, len(TABLES))).astype(np.int32),
        "label": rng.integers(0, 2, rows).astype(np.float32),
    }


def sentences(rows):
    rng = np.random.default_rng(0)
    batch = {
        "source": rng.integers(3, 11, (rows, 6)).astype(np.int32),
        "target": rng.integers(3, 13, (rows, 5)).astype(np.int32),
    }
    batch["source"][1, 4:] = 0
    batch["target"][:, 0], batch["target"][:, 4], batch["target"][1, 3:] = 1, 2, (2, 0)
    return batch


def texts(rows):
    return {"text": np.random.default_rng(0).integers(0, 256, (rows, 9)).astype(np.uint8)}


small_transformer = partial(Transformer, 11, 13, layers=1, width=8, hidden=12, heads=2)

# Name -> (how to make it from dtype and rngs, how to make a batch from a number of rows).
TWINS = {
    "mlp": (partial(Mlp, IMAGE, CLASSES, hidden=(12, 10), dropout=0.3), images),
    "cnn": (partial(Cnn, IMAGE, CLASSES, channels=(4, 6), hidden=12), images),
    "alexnet": (
        partial(
            AlexNet,
            IMAGE,
            CLASSES,
            kernel=3,
            stride=1,
            padding=1,
            channels=(4, 4, 6, 6, 4),
            pool=2,
            grid=1,
            hidden=(16, 16),
        ),
        images,
    ),
    "vgg": (partial(Vgg, IMAGE, CLASSES, stages=((4, 4), (6,)), grid=1, hidden=(16, 16)), images),
    "googlenet": (
        partial(
            GoogLeNet,
            IMAGE,
            CLASSES,
            stem=(4, 4, 6),
            stem_strides=(1, 1),
            stages=((INCEPTION,), (INCEPTION,)),
            auxiliary=(0, 1),
            auxiliary_grid=1,
            hidden=16,
        ),
        images,
    ),
    "resnet": (partial(ResNet, IMAGE, CLASSES, layers=(1, 1), width=4, stem="cifar"), images),
    "dlrm": (partial(Dlrm, TABLES, dim=4, bottom=(8, 6), top=(8, 6)), clicks),
    "transformer": (partial(small_transformer, tied=False), sentences),
    "tied transformer": (small_transformer, sentences),
    "gpt": (partial(Gpt, 256, 8, layers=2, width=8, heads=2), texts),
}


def close(one, two, tolerance=1e-5):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), one, two)


def make(name, **options):
    """A twin with parameters from NumPy: JAX would compile a program for every shape, which takes seconds."""
    return filled(partial(TWINS[name][0], **options))


def filled(make_model):
    """A model made from rngs, with kernels that preserve the scale of activations; no parameter is zero."""
    rng = np.random.default_rng(0)
    graph, state = nnx.split(abstract(make_model))

    def fill(path, leaf):
        kind = path[-1].key if isinstance(path[-1], jax.tree_util.DictKey) else path[-1]
        if kind in ("mean", "var"):
            return jnp.full(leaf.shape, float(kind == "var"), leaf.dtype)
        values = rng.normal(size=leaf.shape)
        if leaf.ndim > 1:
            values *= (2 * leaf.shape[-1] / leaf.size) ** 0.5
        else:
            values = 0.1 * values + (kind == "scale")
        return jnp.asarray(values, leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(fill, nnx.to_pure_dict(state)))


def make_batch(name, rows=4):
    """A batch for training: every row with a number of its own."""
    batch = TWINS[name][1](rows) | {"seed": np.arange(7, 7 + rows, dtype=np.uint32)}
    return {key: jnp.asarray(value) for key, value in batch.items()}


def abstract(make_model):
    """A model as shapes only, for which no array is made."""
    return nnx.eval_shape(lambda: make_model(rngs=nnx.Rngs(0)))


def count(make_model):
    """The parameters of a model that is never made."""
    state = nnx.state(abstract(make_model), nnx.Param)
    return sum(leaf.size for leaf in jax.tree.leaves(state))


def crossing(make_model, batch):
    """The shapes of every block's output, in evaluation mode; the model is never run."""
    model = abstract(make_model)
    model.eval()
    graph, state = nnx.split(model)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in batch.items()}

    def run(state, batch):
        x, activations = None, []
        for block in nnx.merge(graph, state).blocks:
            x = block(x, batch)
            activations.append(x)
        return activations

    return jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(run, state, batch))
