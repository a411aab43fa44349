"""What holds for every model: as a function of its parameters, whole and cut at every block."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from models.dropout import Dropout
from models.functional import apply, cut, merge, split
from models.resnet import ResNet
from tests.models.twins import CLASSES, IMAGE, TWINS, filled, make, make_batch

SMALLER = partial(ResNet, IMAGE, CLASSES, layers=(1,), width=2, stem="cifar")
EACH = pytest.mark.parametrize("name", TWINS)


def close(one, other, tolerance=1e-5):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), one, other)


def through(stages, params, stats, batch, training):
    """The fold over stages, which take their own variables alone."""
    x, found = None, {}
    for stage in stages:
        own, kept = ({index: of[index] for index in mine} for of, mine in ((params, stage.params), (stats, stage.stats)))
        x, new = apply(stage.graph, own, kept, batch, x, training=training)
        found |= new
    return x, found


@cache
def trained(name, cuts):
    """Output, new statistics and gradients of a training call of the stages, the output projected at random."""
    model = make(name)
    whole, stages = split(model), cut(model, cuts)

    @jax.jit
    def run(params, stats, batch):
        def loss(params):
            outputs, new = through(stages, params, stats, batch, training=True)
            weights = [np.random.default_rng(1).normal(size=leaf.shape) for leaf in jax.tree.leaves(outputs)]
            total = sum(jnp.sum(a * w) for a, w in zip(jax.tree.leaves(outputs), weights, strict=True))
            return total, (outputs, new)

        gradients, aux = jax.grad(loss, has_aux=True)(params)
        return *aux, gradients

    return run(whole.params, whole.stats, make_batch(name))


@cache
def evaluator(name):
    graph = split(make(name)).graph
    return jax.jit(lambda params, stats, batch: apply(graph, params, stats, batch, training=False))


def every_cut(name):
    return tuple(range(1, len(make(name).blocks)))


@EACH
def test_stages_hold_the_models_parameters_between_them(name):
    model = make(name)
    whole = split(model)
    own = nnx.to_pure_dict(nnx.state(model, nnx.Param))["blocks"]
    assert jax.tree.structure(whole.params) == jax.tree.structure(own)
    jax.tree.map(np.testing.assert_array_equal, whole.params, own)
    for cuts in (every_cut(name), (2,)):
        stages = cut(model, cuts)
        assert [stage.graph.first for stage in stages] == [0, *cuts]
        for kind in ("params", "stats"):
            together = {}
            for stage in stages:
                assert not together.keys() & getattr(stage, kind).keys()
                together |= getattr(stage, kind)
            assert jax.tree.structure(together) == jax.tree.structure(getattr(whole, kind))
            jax.tree.map(np.testing.assert_array_equal, together, getattr(whole, kind))


@EACH
def test_the_fold_over_stages_is_the_model(name):
    close(trained(name, every_cut(name)), trained(name, ()))
    model, whole, batch = make(name), split(make(name)), make_batch(name)
    outputs, stats = evaluator(name)(whole.params, whole.stats, batch)
    jax.tree.map(np.testing.assert_array_equal, stats, whole.stats)
    model.eval()
    close(outputs, nnx.jit(lambda model, batch: model(batch))(model, batch))


@EACH
def test_no_parameter_is_dead(name):
    _, _, gradients = trained(name, ())
    assert len(jax.tree.leaves(gradients)) == len(jax.tree.leaves(split(make(name)).params))
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.all(np.isfinite(gradient))
        largest = np.abs(gradient).max()
        # The softmax of an attention takes away what all keys have in common.
        is_key_bias = jax.tree_util.keystr(path).endswith("['key']['bias']")
        assert largest < 1e-5 if is_key_bias else largest > 1e-5, path


@EACH
def test_bfloat16_computes_with_float32_parameters(name):
    model, exact = make(name, dtype=jnp.bfloat16), split(make(name))
    graph, params, stats = split(model)
    close(params, exact.params, 0)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, stats))} == {np.dtype("float32")}
    batch = make_batch(name)
    outputs, _ = jax.jit(lambda *args: apply(graph, *args, training=False))(params, stats, batch)
    full, _ = evaluator(name)(params, stats, batch)
    assert outputs.dtype == jnp.float32
    assert np.abs(outputs - full).max() < 0.05 * np.abs(full).max()
    middle = cut(model, (2,))[0]
    crossed, new = jax.eval_shape(
        lambda *args: apply(middle.graph, *args, training=True), middle.params, middle.stats, batch
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(crossed)} == {jnp.dtype("bfloat16")}
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(new))


@EACH
def test_training_draws_by_the_rows_numbers_and_evaluation_does_not(name):
    model, batch = make(name), make_batch(name)
    whole = split(model)
    layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, Dropout)]
    assert len({module.layer for module in layers}) == len(layers)
    assert bool(layers) == (name not in ("cnn", "resnet", "dlrm"))
    other = batch | {"seed": batch["seed"] + 100}
    evaluate = evaluator(name)
    close(evaluate(whole.params, whole.stats, batch), evaluate(whole.params, whole.stats, other), 0)
    del batch["seed"]
    jax.eval_shape(partial(apply, whole.graph, training=False), whole.params, whole.stats, batch)
    if layers:
        with pytest.raises(ValueError, match=r"batch\['seed'\].*evaluation mode"):
            jax.eval_shape(partial(apply, whole.graph, training=True), whole.params, whole.stats, batch)


@EACH
def test_rows_do_not_mix_in_evaluation(name):
    whole, batch = split(make(name)), make_batch(name)
    changed = {key: value.at[0].set(value[2]) for key, value in batch.items()}
    first, second = (evaluator(name)(whole.params, whole.stats, rows)[0] for rows in (batch, changed))
    close(first[1:], second[1:])
    assert np.abs(first[0] - second[0]).max() > 1e-4
    close(second[0], second[2])


@EACH
@pytest.mark.parametrize("is_graph", [True, False])
def test_models_work_in_nnxs_graph_mode_and_tree_mode(name, is_graph):
    with nnx.set_graph_mode(is_graph):
        model = make(name)
        graph, params, stats = split(model)
        assert all(not module.deterministic for _, module in nnx.iter_modules(model) if isinstance(module, Dropout))
        for training in (True, False):
            outputs, new = jax.eval_shape(partial(apply, graph, training=training), params, stats, make_batch(name))
            assert jax.tree.leaves(outputs)[0].shape[0] == 4
            assert jax.tree.structure(new) == jax.tree.structure(stats)


def test_batch_statistics_are_those_of_the_rows_of_a_call():
    graph, params, stats = split(filled(SMALLER))
    batch = make_batch("resnet", 16)
    call = jax.jit(lambda rows: apply(graph, params, stats, rows, training=True))
    outputs, new = jax.jit(lambda rows: apply(graph, params, stats, rows, training=True, rows_per_group=4))(batch)
    parts = [call(jax.tree.map(lambda a, i=i: a[4 * i : 4 * i + 4], batch)) for i in range(4)]
    close(outputs, jnp.concatenate([part[0] for part in parts]))
    close(new, jax.tree.map(lambda *leaves: sum(leaves) / 4, *(part[1] for part in parts)))
    together, _ = call(batch)
    assert np.abs(outputs - together).max() > 1e-2  # other statistics
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(*map(jax.tree.leaves, (new, stats)), strict=True))
    image, convolution = batch["image"], params[0]["first"]["convolution"]["kernel"]
    filtered = jax.lax.conv_general_dilated(image, convolution, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    first = call(batch)[1][0]["first"]["norm"]
    close(first["mean"], 0.1 * filtered.mean(axis=(0, 1, 2)))
    close(first["var"], 0.9 + 0.1 * filtered.var(axis=(0, 1, 2)))
    evaluate = jax.jit(lambda stats: apply(graph, params, stats, batch, training=False, rows_per_group=3)[0])
    assert np.abs(evaluate(new) - evaluate(stats)).max() > 1e-3


def test_groups_of_rows_make_the_result_independent_of_the_mesh():
    graph, params, stats = split(filled(SMALLER))
    batch = make_batch("resnet", 16)

    def gradient(params, rows):
        def loss(params):
            outputs, new = apply(graph, params, stats, rows, training=True, rows_per_group=4)
            return jnp.mean(outputs**2), new

        return jax.grad(loss, has_aux=True)(params)

    def worker(params, rows):
        return jax.lax.pmean(gradient(jax.lax.pcast(params, "data", to="varying"), rows), "data")

    mesh = jc.make_mesh(data=2)
    spread = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    close(spread(params, batch), jax.jit(gradient)(params, batch))


def test_dropout_is_the_same_in_any_micro_batch():
    graph, params, stats = split(make("transformer"))
    batch = make_batch("transformer")
    call = jax.jit(lambda rows: apply(graph, params, stats, rows, training=True)[0])
    halves = [call(jax.tree.map(lambda a, i=i: a[2 * i : 2 * i + 2], batch)) for i in range(2)]
    close(call(batch), jnp.concatenate(halves))
    backwards = call(jax.tree.map(lambda a: a[::-1], batch))
    close(call(batch), backwards[::-1])


def test_what_does_not_fit_is_refused():
    model = make("mlp")
    for cuts in ((0,), (3,), (2, 2), (2, 1), (-1,)):
        with pytest.raises(ValueError, match=r"Cuts are rising indices of blocks, from 1 to 2 .*got"):
            cut(model, cuts)
    graph, params, stats = split(model)
    with pytest.raises(ValueError, match="Rows make whole groups, got 4 rows for groups of 3"):
        apply(graph, params, stats, make_batch("mlp"), training=True, rows_per_group=3)
    with pytest.raises(ValueError, match="Rows make whole groups, got 4 rows for groups of 0"):
        apply(graph, params, stats, make_batch("mlp"), training=True, rows_per_group=0)
    second = cut(model, (2,))[1]
    with pytest.raises(ValueError, match=r"takes the variables of its own blocks, 2 to 2, got some of 0, 1"):
        merge(second.graph, params, stats, training=True)
    del params[1]
    with pytest.raises(ValueError):  # noqa: PT011 (nnx's own)
        apply(graph, params, stats, make_batch("mlp"), training=False)


def test_merged_blocks_share_nothing_with_the_parameters():
    graph, params, stats = split(make("resnet"))
    before = jax.tree.map(np.array, (params, stats))
    blocks = merge(graph, params, stats, training=True)
    batch = make_batch("resnet")
    x = blocks[0](None, batch)
    blocks[1](x, batch)
    jax.tree.map(np.testing.assert_array_equal, before, (params, stats))
    assert not np.array_equal(blocks[0].first.norm.mean[...], stats[0]["first"]["norm"]["mean"])
