"""States in other libraries' checkpoints: Flax's serialization, Orbax with and without a target."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxcomm as jc
from tests.marks import slow_except

K = 4
PARAMS = {"w": jnp.linspace(-1, 1, 60).reshape(12, 5), "b": jnp.zeros(5)}
BATCH = {"x": np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)}
CHAINS = {
    "topk": lambda: jc.chain(jc.topk(0.5, dense_below=0), optax.adam(1e-2)),
    "dct_dp": lambda: optax.chain(jc.dct_dp(0.5, dense_below=0), optax.adam(1e-2)),
    "dgc": lambda: jc.chain(jc.dgc(0.5), optax.sgd(1e-2)),
    "two parts": lambda: jc.chain(jc.topk(0.5, where="w", others=jc.plump_dp()), optax.sgd(1e-2)),
    "accumulated": lambda: jc.chain(jc.topk(0.5, dense_below=0), optax.adam(1e-2), accumulate=3),
    "delayed": lambda: jc.chain(jc.topk(0.5, dense_below=0), optax.adam(1e-2), delay=1),
}


def train_step(state, batch):
    grads = jax.grad(lambda p: ((batch["x"] @ p["w"] + p["b"]) ** 2).mean())(state.params)
    return state.apply_gradients(grads=grads), {}


def fresh(name):
    return TrainState.create(apply_fn=None, params=PARAMS, tx=CHAINS[name]())


def trained(name):
    step = jc.data_parallel(train_step, jc.make_mesh(data=K))
    state = fresh(name)
    for _ in range(2):
        state, _ = step(state, BATCH)
    return step, state


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(a), jax.tree.leaves(b))


@pytest.mark.parametrize("name", slow_except(CHAINS, "topk"))
def test_flax_keeps_every_row(name):
    step, state = trained(name)
    text = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(fresh(name), text)
    equal(restored, state)
    assert jax.tree.structure(restored.opt_state) == jax.tree.structure(fresh(name).opt_state)
    (expected, _), (after, _) = step(state, BATCH), step(restored, BATCH)
    equal(after, expected)


def test_flax_and_another_method():
    _, state = trained("dgc")
    saved = flax.serialization.to_state_dict(state.opt_state[0])
    del saved["worker"]
    with pytest.raises(ValueError, match=r"must have the fields of ExchangeState, .*\['worker'\] are in one of them"):
        flax.serialization.from_state_dict(state.opt_state[0], saved)


def test_orbax(tmp_path):
    step, state = trained("topk")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"params": state.params, "opt_state": state.opt_state})
        checkpointer.wait_until_finished()
        target = step.place(fresh("topk"))
        restored = checkpointer.restore(tmp_path / "state", {"params": target.params, "opt_state": target.opt_state})
        equal(restored["opt_state"], state.opt_state)
        after, _ = step(state.replace(**restored), BATCH)
        equal(after, step(state, BATCH)[0])
        tree = checkpointer.restore(tmp_path / "state")
    with pytest.raises(
        ValueError, match=r"must get the state of an exchange.*restore a checkpoint into it as the target"
    ):
        step(state.replace(opt_state=tree["opt_state"]), BATCH)
    with pytest.raises(ValueError, match=r"must have its types to say where its rows are; got rows in dicts"):
        jc.state_specs(tree)


def test_nnx_state_has_no_places():
    model = nnx.Linear(12, 5, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, CHAINS["topk"](), wrt=nnx.Param)
    with pytest.raises(
        ValueError, match=r"rows in dicts, of nnx\.split, nnx\.state.*Pass optimizer\.opt_state as it is"
    ):
        jc.state_specs(nnx.state(optimizer))
    assert jc.state_specs(optimizer.opt_state)[0].residual.rows.get_value() == jax.P("data")
