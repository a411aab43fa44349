"""Models by name, made for a dataset and cut into stages."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from configs.experiment import Architecture, Experiment
from models.alexnet import AlexNet
from models.blocks import Model
from models.bottleneck import Tokens, add_bottlenecks, decoders
from models.cnn import Cnn
from models.dlrm import Dlrm
from models.googlenet import GoogLeNet
from models.gpt import Gpt
from models.mlp import Mlp
from models.resnet import ResNet
from models.transformer import Transformer
from models.vgg import Vgg
from train.data import ClickInfo, DatasetInfo, ImageInfo, TextInfo, TranslationInfo

MODELS: dict[str, Callable[..., Model]] = {
    "alexnet": AlexNet,
    "cnn": Cnn,
    "dlrm": Dlrm,
    "googlenet": GoogLeNet,
    "gpt": Gpt,
    "mlp": Mlp,
    "resnet": ResNet,
    "transformer": Transformer,
    "vgg": Vgg,
}

# Where the papers cut DLRM, by number of stages; see `choose_cuts`.
_DLRM_CUTS = {2: (2,), 3: (2, 7), 4: (2, 4, 7)}


def make_model(architecture: Architecture, info: DatasetInfo, dtype: str, seed: int | jax.Array) -> Model:
    """Makes a model for a dataset, with initial parameters drawn from a seed or a key.

    Raises:
      ValueError: if there is no model of that name, it is for another kind of data, or cannot have the bottlenecks.
    """
    model = _model(architecture, info, dtype, seed)
    if architecture.rank:
        batch = {name: jax.ShapeDtypeStruct((1, *shape), dtype) for name, (shape, dtype) in info.row_types().items()}
        key = jax.random.fold_in(nnx.Rngs(seed).params(), 1)  # other numbers than the model's own
        tokens = _tokens(model, info)
        add_bottlenecks(model, architecture.cuts, architecture.rank, batch, tokens=tokens, rngs=nnx.Rngs(key))
    return model


def _tokens(model: Model, info: DatasetInfo) -> Callable[[int], Sequence[Tokens]] | None:
    """Returns the tokens that have anchors, by cut; see `add_bottlenecks`."""
    match info:
        case TextInfo():
            return lambda _: [(lambda batch: batch["text"][:, :-1].astype(jnp.int32), info.vocabulary_size)]
        case TranslationInfo():
            source = (lambda batch: batch["source"], info.vocabulary_size)
            target = (lambda batch: batch["target"][:, :-1], info.vocabulary_size)
            embedding = 2 * cast(Transformer, model).layers + 1  # of the target
            return lambda first: [source, target, target] if first > embedding else [source, source]
    return None


def with_bottlenecks(experiment: Experiment, info: DatasetInfo) -> Experiment:
    """Returns the experiment whose model has the bottlenecks of `experiment.boundary`, cut between their layers."""
    if not experiment.boundary.rank:
        return experiment
    model = nnx.eval_shape(lambda: make_model(experiment.architecture, info, experiment.dtype, experiment.seed))
    cuts = choose_cuts(model, experiment.stages, experiment.cuts)
    if isinstance(model, Transformer) and experiment.cuts is None:
        cuts = tuple(first + 1 for first in cuts)  # after the layer: another array crosses after its ReLU
    architecture = dataclasses.replace(experiment.architecture, cuts=cuts, rank=experiment.boundary.rank)
    return dataclasses.replace(experiment, architecture=architecture, cuts=decoders(cuts))


def _model(architecture: Architecture, info: DatasetInfo, dtype: str, seed: int | jax.Array) -> Model:
    if architecture.name not in MODELS:
        raise ValueError(f"A model must be one of {', '.join(MODELS)}; got {architecture.name!r}.")
    make = partial(MODELS[architecture.name], dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed), **architecture.options)
    match info, architecture.name:
        case ClickInfo(), "dlrm":
            return make(info.table_sizes, dense_features=info.num_dense)
        case TranslationInfo(), "transformer":
            return make(info.vocabulary_size, info.vocabulary_size)
        case TextInfo(), "gpt":
            return make(info.vocabulary_size, info.length)
        case ImageInfo(), name if name not in ("dlrm", "transformer", "gpt"):
            return make(info.image_shape, info.num_classes)
    raise ValueError(
        f"A model must be trained on its kind of data; got {architecture.name!r} and {info.name!r} "
        f"({type(info).__name__}). dlrm takes clicks, transformer translations, gpt text, and the others images."
    )


def choose_cuts(model: Model, stages: int, cuts: tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns the first block of every stage but the first.

    Args:
      model: the model.
      stages: S.
      cuts: of the experiment; None for the paper's, or, if there are none, stages of nearly equally many blocks.

    Raises:
      ValueError: for a wrong number of cuts, or more stages than blocks.
    """
    count: Any = len(model.blocks)
    if cuts is not None:
        if len(cuts) != stages - 1:
            raise ValueError(
                f"A pipeline of {stages} stages must have {stages - 1} cuts; got --cuts {cuts}. Give a block for each, "
                "or none."
            )
        return cuts
    if stages > count:
        raise ValueError(
            f"Every stage must have a block; got --stages {stages} for a model of {count} blocks. Use at most {count} "
            "stages."
        )
    if isinstance(model, Dlrm) and count == 9 and stages in _DLRM_CUTS:
        return _DLRM_CUTS[stages]
    if isinstance(model, Transformer):
        late, middle = -(-model.layers * 5 // 6), -(-model.layers // 2)  # 5 and 3 of 6
        layers_of = {2: ((late,), ()), 3: ((late,), (late,)), 5: ((middle, late), (middle, late))}
        if stages in layers_of and (stages < 5 or middle < late):
            return model.cuts_after_relu(encoder=layers_of[stages][0], decoder=layers_of[stages][1])
    return even_cuts(count, stages)


def even_cuts(blocks: int, stages: int) -> tuple[int, ...]:
    """Returns the cuts of a model into stages of nearly equally many blocks."""
    return tuple(round(stage * blocks / stages) for stage in range(1, stages))
