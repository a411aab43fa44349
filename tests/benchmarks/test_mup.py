"""Initial values and rates against the rule, worked out by hand; and what the rule promises, at two widths."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import mup
from benchmarks.mup import Text, Trainer, body_size, make_chain, model_of, rate_factors
from configs.methods import LocalSgd, PlumpDp
from models.functional import apply

TEXT = Text("stdlib", None, 4)


def by_name(tree, names=("table", "expand/kernel", "query/kernel", "dense/kernel", "bias")):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return {name.partition("/")[0]: next(leaf for path, leaf in paths.items() if name in path) for name in names}


@pytest.fixture(scope="module")
def wide():
    """Twice as wide as the base."""
    return model_of(TEXT, 2, 96).params


def test_rates_of_twice_the_width(wide):
    adam = {"table": 1, "expand": 0.5, "query": 0.353553, "dense": 0.5, "bias": 1}
    assert by_name(rate_factors(wide, 96, "adam")) == pytest.approx(adam, rel=1e-5)
    assert by_name(rate_factors(wide, 96, "sign")) == pytest.approx(adam, rel=1e-5)
    muon = adam | {"expand": 0.707107, "query": 0.5}
    assert by_name(rate_factors(wide, 96, "muon")) == pytest.approx(muon, rel=1e-5)
    base = model_of(TEXT, 2, 48).params
    assert all(factor == 1 for factor in jax.tree.leaves(rate_factors(base, 48, "muon")))


def test_first_values_of_twice_the_width(wide):
    deviations = {name: float(leaf.std()) for name, leaf in by_name(wide).items()}
    expected = {"table": 0.5, "expand": 0.10206, "query": 0.07217, "dense": 0.07217, "bias": 0}
    assert deviations == pytest.approx(expected, rel=0.03)
    (contract,) = by_name(wide, ["contract/kernel"]).values()
    assert float(contract.std()) == pytest.approx(0.5 / np.sqrt(96 * 4), rel=0.03)  # 4 terms: 2 of each layer


def test_parameters_are_counted():
    for layers, width in ((2, 96), (1, 8)):
        leaves = jax.tree_util.tree_leaves_with_path(model_of(TEXT, layers, width).params)
        others = sum(leaf.size for path, leaf in leaves if mup.kind(path) in ("table", "logits"))
        assert body_size(layers, width) == sum(leaf.size for _, leaf in leaves) - others


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_updates_change_wide_models_no_more(optimizer):
    """With the same rate for all parameters, logits of 8 times the width would change 1.7 times as much by Adam."""
    text = {"text": jnp.asarray(np.resize(np.arange(7) * 11, (2, 33)), jnp.uint8)}

    def change(width):
        model = model_of(TEXT, 1, width)
        chain = make_chain(PlumpDp(), optimizer, optax.constant_schedule(0.01), width)

        def logits(params):
            return apply(model.graph, params, model.stats, text, training=True)[0]

        def loss(params):
            labels = text["text"][:, 1:].astype(jnp.int32)
            return optax.softmax_cross_entropy_with_integer_labels(logits(params), labels).mean()

        def steps(params):
            state, new = chain.init(params), params
            for _ in range(3):
                updates, state = chain.update(jax.grad(loss)(new), state, new)
                new = optax.apply_updates(new, updates)
            return jnp.abs(logits(new) - logits(params)).mean()

        rows = jax.tree.map(lambda leaf: leaf[None], model.params)  # one worker
        return float(jax.jit(jax.vmap(steps, axis_name="data"))(rows)[0])

    assert 0.33 < change(192) / change(24) < 1.2


def test_runs_share_a_program_and_repeat():
    options = {"workers": 2, "steps": 4, "warm_up": 1}
    trainer = Trainer(TEXT, 1, 8, PlumpDp(), "adam", **options)
    first, faster, again = (trainer.run(rate, 0, 2) for rate in (1e-3, 1e-1, 1e-3))
    assert first["losses"] == again["losses"] != faster["losses"]
    assert (first["steps"], first["loss"]) == ([2, 4], first["losses"][-1])
    assert first["received"] == [2 * first["bytes_per_step"], 4 * first["bytes_per_step"]]
    assert trainer._step._cache_size() == 1
    together = Trainer(TEXT, 1, 8, PlumpDp(), "adam", **options | {"workers": 1}).run(1e-3, 0, 2)
    assert together["losses"] == pytest.approx(first["losses"], rel=1e-5)


def test_local_methods_scale_before_the_exchange():
    chain = make_chain(LocalSgd(steps=2), "adam", optax.constant_schedule(1.0), 48)
    states = chain.init(model_of(TEXT, 1, 8).params)
    assert [type(state).__name__ for state in states][::3] == ["ScaleByAdamState", "ExchangeState"]
