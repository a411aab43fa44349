from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from configs.dlrm_criteo import TABLE_SIZES
from models.dlrm import Dlrm, Interaction, Layer
from models.functional import apply, cut, split
from tests.marks import slow_except
from tests.models.twins import TABLES, TWINS, abstract, close, count, crossing, filled, make, make_batch
from tests.refusals import refused

PAPERS = partial(Dlrm, TABLE_SIZES)


def test_parameters():
    mlp = [(13, 512), (512, 256), (256, 64), (64, 16), (16 + 27 * 26 // 2, 512), (512, 256), (256, 128), (128, 1)]
    in_mlps = sum((i + 1) * o for i, o in mlp)
    assert (in_mlps, sum(TABLE_SIZES)) == (508_753, 33_762_577)
    assert count(PAPERS) == in_mlps + 16 * sum(TABLE_SIZES)


def test_what_crosses():
    batch = {"dense": ((2, 13), np.float32), "categories": ((2, 26), np.int32)}
    assert crossing(PAPERS, batch) == [(2, n) for n in (512, 256, 64, 16, 367, 512, 256, 128)] + [(2,)]


def test_cuts_of_256_features():
    batch = {"dense": ((2, 13), np.float32), "categories": ((2, 26), np.int32)}
    batch = {name: jax.ShapeDtypeStruct(*spec) for name, spec in batch.items()}
    stages = cut(abstract(PAPERS), (2, 7))
    x, tables = None, []
    for stage in stages:
        x, _ = jax.eval_shape(partial(apply, stage.graph, training=True), stage.params, {}, batch, x)
        tables.append(4 in stage.params)
        assert x.shape == ((2, 256) if stage is not stages[-1] else (2,))
    assert tables == [False, True, False]


def test_multiples_of_rows():
    table = Interaction(TABLES, 4, 8, "exchange", "data", dtype=jnp.float32, rngs=nnx.Rngs(0)).table[...]
    assert table.shape == (16, 4)
    np.testing.assert_array_equal(table[15:], 0)
    assert np.all(np.asarray(table[:15]) != 0)
    for start, size in ((0, 5), (5, 7), (12, 3)):
        largest = np.abs(table[start : start + size]).max()
        assert 0.5 * size**-0.5 < largest <= size**-0.5
    assert count(partial(Dlrm, TABLES, dim=4, row_multiple=8)) - count(partial(Dlrm, TABLES, dim=4)) == 4


def test_initial_values():
    first = Layer(512, 256, is_last=False, dtype=jnp.float32, rngs=nnx.Rngs(0)).linear
    np.testing.assert_allclose(np.std(first.kernel[...]), (2 / (512 + 256)) ** 0.5, rtol=0.01)
    np.testing.assert_allclose(np.std(first.bias[...]), 256**-0.5, rtol=0.15)


def test_outputs():
    """A transcription in NumPy: every pair of distinct vectors once, after the dense features."""
    model, batch = make("dlrm"), make_batch("dlrm")
    layers = [block.linear for index, block in enumerate(model.blocks) if index != 3]
    weights = [(np.asarray(layer.kernel[...]), np.asarray(layer.bias[...])) for layer in layers]
    x = np.asarray(batch["dense"])
    for kernel, bias in weights[:3]:
        x = np.maximum(x @ kernel + bias, 0)
    table, starts = np.asarray(model.blocks[3].table[...]), np.cumsum([0, *TABLES])
    rows = []
    for dense, categories in zip(x, np.asarray(batch["categories"]), strict=True):
        vectors = [dense] + [table[starts[f] + c] for f, c in enumerate(categories)]
        products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        rows.append(np.concatenate([dense, products]))
    x = np.stack(rows)
    for kernel, bias in weights[3:-1]:
        x = np.maximum(x @ kernel + bias, 0)
    kernel, bias = weights[-1]
    np.testing.assert_allclose(model(batch), (x @ kernel + bias)[:, 0], rtol=1e-4, atol=1e-5)


def test_a_category_outside_its_table():
    model, batch = make("dlrm"), make_batch("dlrm")
    for wrong in (5, -1):  # the first table has 5 rows, and another's come after them
        categories = batch["categories"].at[1, 0].set(wrong)
        assert np.isnan(model(batch | {"categories": categories})).tolist() == [False, True, False, False]
    with pytest.raises(ValueError, match=r"a column for every table; got shape \(4, 2\) for 3 tables"):
        model(batch | {"categories": batch["categories"][:, :2]})
    for options in ({"table_sizes": ()}, {"table_sizes": (3, 0)}, {"table_sizes": (3,), "row_multiple": 0}):
        with pytest.raises(ValueError, match=r"sizes must have .* and row_multiple must be at least 1"):
            Dlrm(rngs=nnx.Rngs(0), **options)
    refused(lambda: Dlrm((3,), embeddings="tables", rngs=nnx.Rngs(0)), "embeddings", "got 'tables'")


@pytest.mark.parametrize("embeddings", slow_except(["late", "columns", "rows"], "late"))
def test_gradients_of_sharded_tables(embeddings):
    """Of 15 rows, filled up to 16 for two workers."""
    spec = {"late": P(), "columns": P(None, "data"), "rows": P("data")}[embeddings]
    local = filled(partial(TWINS["dlrm"][0], embeddings=embeddings, row_multiple=2))
    whole, sharded = split(filled(partial(TWINS["dlrm"][0], row_multiple=2))), split(local)
    batch = {name: rows for name, rows in make_batch("dlrm", 8).items() if name != "seed"}

    def loss(graph, params, batch):
        logits, _ = apply(graph, params, {}, batch, training=True)
        return jnp.mean(logits**2), logits

    gradient = jax.grad(loss, argnums=1, has_aux=True)

    def worker(params, batch):
        local = params | jax.lax.pcast({i: p for i, p in params.items() if i != 3}, "data", to="varying")
        gradients, logits = gradient(sharded.graph, local, batch)
        table = gradients[3]["table"] / (1 if embeddings == "late" else 2)
        return jax.lax.pmean({i: p for i, p in gradients.items() if i != 3}, "data"), table, logits

    specs = jax.tree.map(lambda _: P(), whole.params) | {3: {"table": spec}}
    mesh = jc.make_mesh(data=2)
    step = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), spec, P("data"))))
    replicated, table, logits = step(whole.params, batch)
    expected, result = jax.jit(partial(gradient, whole.graph))(whole.params, batch)
    close(logits, result)
    close(replicated | {3: {"table": table}}, expected)
    assert np.any(table[:15], axis=1).sum() > 5
    wrong = batch | {"categories": batch["categories"].at[1, 0].set(5)}  # the first table has 5 rows
    assert np.isnan(step(whole.params, wrong)[2]).tolist() == [index == 1 for index in range(8)]


def test_tables_split_by_the_compiler():
    graph, params, _ = split(filled(partial(TWINS["dlrm"][0], row_multiple=8)))
    batch, mesh = make_batch("dlrm"), jc.make_mesh(model=8)
    assert params[3]["table"].shape == (16, 4)
    run = jax.jit(lambda params: apply(graph, params, {}, batch, training=False)[0])
    by_rows = jax.NamedSharding(mesh, P("model"))
    close(run(params | {3: {"table": jax.device_put(params[3]["table"], by_rows)}}), run(params))
