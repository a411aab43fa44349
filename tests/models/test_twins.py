"""Properties of every model, whole and cut at every block."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.dropout import Dropout
from models.functional import apply, cut, split
from tests.marks import slow_except
from tests.models.twins import TWINS, close, make, make_batch

EACH = pytest.mark.parametrize("name", slow_except(TWINS, "mlp", "cnn", "dlrm"))


def through(stages, params, stats, batch, training):
    """The composition of the stages, each of which gets only its own variables."""
    x, outputs = None, {}
    for stage in stages:
        params_of_stage, stats_of_stage = (
            {index: params[index] for index in stage.params},
            {index: stats[index] for index in stage.stats},
        )
        x, new = apply(stage.graph, params_of_stage, stats_of_stage, batch, x, training=training)
        outputs |= new
    return x, outputs


def called(model, params, stats, batch):
    """The model itself, in training mode."""
    whole = nnx.merge(nnx.graphdef(model), {"blocks": params}, {"blocks": stats}, copy=True)
    outputs = whole(batch)
    return outputs, nnx.to_pure_dict(nnx.state(whole, nnx.BatchStat)).get("blocks", {})


@cache
def trained(name):
    """Output, new statistics and gradients of a training call cut at every block, the output projected at random."""
    model = make(name)
    whole, stages = split(model), cut(model, every_cut(name))

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
def test_parameters_of_stages(name):
    model = make(name)
    whole = split(model)
    blocks = nnx.to_pure_dict(nnx.state(model, nnx.Param))["blocks"]
    assert jax.tree.structure(whole.params) == jax.tree.structure(blocks)
    jax.tree.map(np.testing.assert_array_equal, whole.params, blocks)
    for cuts in (every_cut(name), (2,)):
        stages = cut(model, cuts)
        assert [stage.graph.first for stage in stages] == [0, *cuts]
        for kind in ("params", "stats"):
            leaves = {}
            for stage in stages:
                assert not leaves.keys() & getattr(stage, kind).keys()
                leaves |= getattr(stage, kind)
            assert jax.tree.structure(leaves) == jax.tree.structure(getattr(whole, kind))
            jax.tree.map(np.testing.assert_array_equal, leaves, getattr(whole, kind))


@EACH
def test_stages_are_the_model(name):
    model = make(name)
    whole = split(model)
    outputs, stats, _ = trained(name)
    close((outputs, stats), jax.jit(partial(called, model))(whole.params, whole.stats, make_batch(name)))


@EACH
def test_dead_parameters(name):
    _, _, gradients = trained(name)
    assert len(jax.tree.leaves(gradients)) == len(jax.tree.leaves(split(make(name)).params))
    rounding = 1e-6 * max(np.abs(gradient).max() for gradient in jax.tree.leaves(gradients))
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.all(np.isfinite(gradient))
        largest = np.abs(gradient).max()
        # An attention's softmax cancels what all keys have in common.
        is_key_bias = jax.tree_util.keystr(path).endswith("['key']['bias']")
        assert largest < rounding if is_key_bias else largest > rounding, path


@EACH
def test_bfloat16(name):
    model, exact = make(name, dtype=jnp.bfloat16), split(make(name))
    graph, params, stats = split(model)
    close(params, exact.params, 0)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, stats))} == {np.dtype("float32")}
    batch = make_batch(name)
    outputs, _ = jax.jit(lambda *args: apply(graph, *args, training=False))(params, stats, batch)
    full, _ = evaluator(name)(params, stats, batch)
    assert outputs.dtype == jnp.float32
    assert np.abs(outputs - full).max() < 0.05 * np.abs(full).max()
    first = cut(model, (1,))[0]
    activation, new = jax.eval_shape(partial(apply, first.graph, training=True), first.params, first.stats, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(activation)} == {jnp.dtype("bfloat16")}
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(new))


@EACH
def test_draws_by_rows(name):
    model, batch = make(name), make_batch(name)
    whole = split(model)
    layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, Dropout)]
    assert len({module.layer for module in layers}) == len(layers)
    assert bool(layers) == (name not in ("cnn", "resnet", "dlrm", "gpt"))
    variant = batch | {"seed": batch["seed"] + 100}
    evaluate = evaluator(name)
    outputs, stats = evaluate(whole.params, whole.stats, batch)
    jax.tree.map(np.testing.assert_array_equal, (outputs, stats), evaluate(whole.params, whole.stats, variant))
    jax.tree.map(np.testing.assert_array_equal, stats, whole.stats)
    del batch["seed"]
    jax.eval_shape(partial(apply, whole.graph, training=False), whole.params, whole.stats, batch)
    if layers:
        with pytest.raises(ValueError, match=r"batch\['seed'\].*evaluation mode"):
            jax.eval_shape(partial(apply, whole.graph, training=True), whole.params, whole.stats, batch)


@EACH
def test_rows_do_not_mix(name):
    whole, batch = split(make(name)), make_batch(name)
    variant = {key: value.at[0].set(value[2]) for key, value in batch.items()}
    first, second = (evaluator(name)(whole.params, whole.stats, rows)[0] for rows in (batch, variant))
    close(first[1:], second[1:])
    assert np.abs(first[0] - second[0]).max() > 1e-4
    close(second[0], second[2])


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("is_graph", [True, False])
def test_graph_and_tree_mode(name, is_graph):
    with nnx.set_graph_mode(is_graph):
        model = make(name)
        graph, params, stats = split(model)
        assert all(not module.deterministic for _, module in nnx.iter_modules(model) if isinstance(module, Dropout))
        for training in (True, False):
            outputs, new = jax.eval_shape(partial(apply, graph, training=training), params, stats, make_batch(name))
            assert jax.tree.leaves(outputs)[0].shape[0] == 4
            assert jax.tree.structure(new) == jax.tree.structure(stats)
