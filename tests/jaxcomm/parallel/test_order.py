"""Every rule, with a chain that breaks it and the chain that its remedy makes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import masked

import jaxcomm as jc
from jaxcomm import chain
from jaxcomm.collectives.axis import in_axes_of_workers
from jaxcomm.parallel.order import check_chain, try_link
from tests.jaxcomm.steps import init_state

PARAMS = {"b": np.ones(3, np.float32), "w": np.arange(900, dtype=np.float32).reshape(300, 3)}
W = {"b": False, "w": True}  # a mask


def judge(tx):
    axes = ("slice", "data")  # a hierarchy's; others use one of them
    state = jax.eval_shape(in_axes_of_workers(tx.init, (2, 2), axes), PARAMS)
    return check_chain(tx, state, PARAMS)


def plain(tx):
    """The same chain without its links."""
    return optax.chain(*(plain(link) for link in tx.links)) if hasattr(tx, "links") else tx


def of_a_user(inner):
    """A transformation that fails when it is tried: only its state is known."""

    def update(updates, state, params=None, *, loss):
        return inner.update(updates, state, params)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def multi_steps(tx):
    return optax.MultiSteps(tx, 4).gradient_transformation()


def parts(large, small):
    return optax.partition({"large": large, "small": small}, {"b": "small", "w": "large"})


def some_steps(tx):
    return optax.conditionally_transform(tx, lambda step: step > 3)


def dgc(momentum):
    return jc.dgc(momentum=momentum)


def iwp(momentum):
    return jc.iwp(momentum=momentum)


def hierarchical(method, *args, **options):
    return jc.hierarchical(method(*args, **options, axis_name="slice"))


def injected_sgd(**options):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.0, 1.0, 10), **options)


schedule = optax.linear_schedule(0.1, 0.0, 100)
dct, topk, plump = jc.dct_dp(0.9), jc.topk(0.9), jc.plump_dp()
slim, local, models = jc.slim_dp(), jc.local_sgd(exchange=topk), jc.plump_dp(p=4)
sign, terngrad = jc.sign(), jc.terngrad()
scale, adam, sgd, heavy = optax.scale(-0.1), optax.adam(0.1), optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)
decay, clip, ema = optax.add_decayed_weights(1e-4), optax.clip_by_global_norm(1.0), optax.ema(0.9)
decay_w, decay_later = optax.add_decayed_weights(1e-4, W), optax.add_decayed_weights(schedule)
adaptive, rms, zero = optax.adaptive_grad_clip(0.1), optax.clip_by_block_rms(1.0), optax.set_to_zero()
norm = optax.snapshot("norm", optax.tree.norm)

TWICE = r"must average every gradient once; got .* and .* in one chain. Keep one"
STATE = r"state of a link before .* must be replicated; got .*Put it after .*local_sgd and slim_dp come after"
CLIPPED = r"clipped before an exchange with error feedback; got a clip after .* never come back. Put it before"
MOMENTUM = r"Momentum must be applied once; got an optimizer with momentum after .*momentum=0.9\). Use optax.sgd\("
ASCENT = r"must come after a whole local optimizer; got no learning rate before it.* Write jaxcomm.chain"
LEAVES = r"must be the last link that changes updates; got one after it.* Put it before"
INSIDE = (
    r"must be a link of the chain itself; got {} inside a transformation with the state .* Put the exchange before it"
)

# name: (refused, message, accepted). What states alone show is also refused in an `optax.chain`.
BY_STATE = {
    "twice": (chain(dct, chain(topk, scale)), TWICE, chain(dct, scale)),
    "twice, locally": (chain(dct, sgd, local), TWICE, chain(sgd, local)),
    "state of momentum": (chain(heavy, dct), STATE, chain(dct, heavy)),
    "state of Adam": (chain(optax.adamw(0.1), plump), STATE, chain(plump, optax.adamw(0.1))),
    "state under a mask": (chain(masked(ema, W), dct, scale), STATE, chain(dct, masked(ema, W), scale)),
    "state of a wrapper": (
        chain(optax.apply_if_finite(clip, 3), topk, scale),
        STATE,
        chain(clip, topk, optax.apply_if_finite(scale, 3)),
    ),
    "state of steps": (chain(multi_steps(clip), topk, scale), STATE, chain(clip, topk, multi_steps(scale))),
    "state of NaN": (chain(optax.zero_nans(), topk, scale), STATE, chain(topk, optax.zero_nans(), scale)),
    "state, injected": (chain(injected_sgd(momentum=0.9), dct), STATE, chain(dct, injected_sgd(momentum=0.9))),
    "state of a user": (chain(of_a_user(optax.trace(0.9)), dct), STATE, chain(of_a_user(clip), dct)),
    "momentum of dgc": (chain(dgc(0.9), heavy), MOMENTUM, chain(dgc(0.9), sgd)),
    "momentum of iwp": (chain(iwp(0.9), adam), MOMENTUM, chain(iwp(0), adam)),
    "momentum in a hierarchy": (
        chain(hierarchical(jc.dgc, momentum=0.9), heavy),
        MOMENTUM,
        chain(hierarchical(jc.dgc, momentum=0.0), heavy),
    ),
    "in a named chain": (
        optax.named_chain(("mean", dct), ("sgd", sgd)),
        INSIDE.format("dct_dp"),
        chain(dct, sgd),
    ),
    "in a mask": (
        chain(plump, masked(dct, W), sgd),
        INSIDE.format("dct_dp"),
        chain(jc.dct_dp(where="w", others=plump), sgd),
    ),
    "in masks": (chain(masked(topk, W), masked(dct, W)), INSIDE.format("topk"), chain(dct, masked(sgd, W))),
    "in parts": (parts(chain(dct, adam), sgd), INSIDE.format("dct_dp"), chain(dct, parts(adam, sgd))),
    "local, in a part": (chain(sgd, masked(local, W)), INSIDE.format("local_sgd"), chain(masked(sgd, W), local)),
    "local, in MultiSteps": (
        multi_steps(chain(sgd, local)),
        INSIDE.format("local_sgd"),
        chain(multi_steps(sgd), local),
    ),
    "in MultiSteps": (multi_steps(chain(dct, adam)), INSIDE.format("dct_dp"), chain(dct, multi_steps(adam))),
    "in apply_if_finite": (
        optax.apply_if_finite(chain(topk, adam), 3),
        INSIDE.format("topk"),
        chain(topk, optax.apply_if_finite(adam, 3)),
    ),
    "in some steps": (
        some_steps(chain(topk, scale)),
        INSIDE.format("topk"),
        chain(topk, some_steps(optax.trace(0.9)), scale),
    ),
}
BY_EFFECT = {
    "clip the norm": (chain(dct, clip, adam), CLIPPED, chain(clip, dct, adam)),
    "clip updates": (chain(topk, sgd, optax.clip(1.0)), CLIPPED, chain(plump, sgd, optax.clip(1.0))),
    "clip adaptively": (chain(sign, adaptive, scale), CLIPPED, chain(terngrad, adaptive, scale)),
    "clip momentum": (chain(dct, optax.trace(0.9), rms, scale), CLIPPED, chain(dct, optax.adafactor(0.1))),
    "clip in a hierarchy": (
        chain(hierarchical(jc.dct_dp, 0.9), clip, sgd),
        CLIPPED,
        chain(hierarchical(jc.plump_dp), clip, sgd),
    ),
    "clip the other part": (
        chain(dct, parts(adam, sgd), parts(scale, clip)),
        CLIPPED,
        chain(dct, parts(sgd, adam), parts(scale, clip)),
    ),
    "clip, by a user": (
        chain(dct, optax.stateless(lambda updates, _: jax.tree.map(lambda u: u.clip(-1, 1), updates)), sgd),
        CLIPPED,
        chain(dct, optax.stateless(lambda updates, _: jax.tree.map(lambda u: u / 2, updates)), sgd),
    ),
    "momentum of 0 in Adam": (chain(dgc(0.9), optax.lion(0.1)), MOMENTUM, chain(dgc(0.9), optax.adam(0.1, b1=0.0))),
    "momentum of 0 in SGD": (chain(iwp(0.9), heavy), MOMENTUM, chain(iwp(0.9), optax.sgd(0.1, momentum=0.0))),
    "ascent of gradients": (chain(local), ASCENT, chain(scale, local)),
    "ascent of models": (chain(clip, models), ASCENT, chain(heavy, models)),
    "ascent of Adam": (
        chain(clip, optax.scale_by_adam(), decay, slim),
        ASCENT,
        chain(clip, optax.adamw(schedule), slim),
    ),
    "leaves by a factor": (chain(sgd, slim, optax.scale(0.5)), LEAVES, chain(sgd, optax.scale(0.5), slim, norm)),
    "leaves by decay": (chain(sgd, local, decay), LEAVES, chain(sgd, local, optax.add_decayed_weights(0.0))),
}
REFUSED = BY_STATE | BY_EFFECT

RATE = r"A learning rate before .* enters the residual, .*: put it after"
L2 = r"Weight decay before .* is L2, which the optimizer after it normalises .*: put it after"
SGDW = r"Weight decay after .* has none of its momentum of 0.9, .*: put optax.add_decayed_weights before"

# name: (unusual, message, usual)
UNUSUAL = {
    "rate": (chain(sgd, dct), RATE, chain(sgd, plump)),
    "rate, scheduled": (
        chain(optax.scale_by_learning_rate(schedule), topk),
        RATE,
        chain(topk, optax.scale_by_learning_rate(schedule)),
    ),
    "rate, an array": (
        chain(optax.scale(jnp.float32(-0.1)), topk),
        RATE,
        chain(optax.scale(jnp.float32(1 / 128)), topk, sgd),  # undoes the loss's scale
    ),
    "rate, injected": (chain(injected_sgd(), topk), RATE, chain(topk, injected_sgd())),
    "rate in a hierarchy": (chain(sgd, hierarchical(jc.topk)), RATE, chain(sgd, hierarchical(jc.quant_dp))),
    "L2 and Adam": (chain(decay, plump, adam), L2, chain(plump, optax.adamw(0.1))),
    "L2 and SGD": (chain(decay, dct, optax.rmsprop(0.1)), L2, chain(decay, dct, heavy)),
    "L2 of a part": (
        chain(parts(decay, clip), dct, parts(adam, sgd)),
        L2,
        chain(parts(clip, decay), dct, parts(adam, sgd)),
    ),
    "SGDW": (chain(dgc(0.9), decay, scale), SGDW, chain(decay, dgc(0.9), scale)),
    "SGDW, not AdamW": (chain(iwp(0.9), decay, sgd), SGDW, chain(iwp(0.9), optax.scale_by_rms(), decay, sgd)),
    "SGDW, no momentum": (chain(dgc(0.9), decay_later, scale), SGDW, chain(dgc(0.0), decay_later, heavy)),
    "SGDW, masked": (chain(dgc(0.9), decay_w, scale), SGDW, chain(dct, decay_w, heavy)),
}

FINE = {
    "nothing": optax.identity(),
    "no exchange": chain(clip, adam),
    "an exchange alone": dct,
    "what belongs to a local gradient": chain(decay, clip, optax.add_noise(0.1, 0.5, 0), optax.scale(0.5), dct, sgd),
    "what may be a local optimizer": chain(of_a_user(sgd), slim),
    "what may not change updates": chain(sgd, slim, of_a_user(optax.identity())),
    "clip, by a user who is not understood": chain(dct, of_a_user(clip), sgd),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_a_chain_that_breaks_a_rule_is_refused_with_the_remedy(rule):
    broken, message, remedied = REFUSED[rule]
    with pytest.raises(ValueError, match=message):
        judge(broken)
    assert judge(remedied) == []


@pytest.mark.parametrize("rule", BY_STATE)
def test_what_states_show_is_refused_in_a_plain_chain(rule):
    broken, message, remedied = BY_STATE[rule]
    with pytest.raises(ValueError, match=message):
        judge(plain(broken))
    if "iwp" not in rule:  # momentum of 0 in Adam's state is only noticed when it is tried
        assert judge(plain(remedied)) == []


@pytest.mark.parametrize("rule", UNUSUAL)
def test_an_unusual_chain_is_warned_about_with_the_remedy(rule):
    unusual, message, usual = UNUSUAL[rule]
    (warning,) = judge(unusual)
    assert re.search(message, warning), warning
    assert judge(usual) == []


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) + jnp.sum(params["b"] ** 2)


@pytest.mark.parametrize("rule", [*REFUSED, *UNUSUAL])
def test_what_the_remedy_makes_runs_on_a_mesh(rule):
    tx = {**REFUSED, **UNUSUAL}[rule][2]
    axes = {"slice": 2, "data": 2} if "hierarchy" in rule else {"data": 2}
    mesh, names = jc.make_mesh(**axes), tuple(axes) if len(axes) > 1 else "data"
    state = jax.eval_shape(lambda: init_state(PARAMS, tx, mesh, axis_name=names))
    if "of a user" in rule:
        return  # it takes arguments that the step does not have
    batch = {"x": np.ones((4, 300), np.float32), "y": np.ones((4, 3), np.float32)}
    new, _ = jax.eval_shape(jc.make_train_step(loss_fn, tx, mesh, axis_name=names), state, batch)
    assert jax.tree.structure(new) == jax.tree.structure(state)


@pytest.mark.parametrize("case", FINE)
def test_what_is_in_order_or_not_known_is_left_alone(case):
    assert judge(FINE[case]) == []


def test_a_chain_is_optaxs_and_keeps_its_links():
    tx = chain(clip, chain(dct, adam))
    assert tx.links == (clip, dct, adam)
    assert isinstance(tx, optax.GradientTransformation)
    same = optax.chain(clip, dct, adam)
    assert jax.tree.structure(tx.init(PARAMS)) == jax.tree.structure(same.init(PARAMS))


def test_a_chain_inside_keeps_its_links_too():
    with pytest.raises(ValueError, match=r"got topk in an optax.chain inside it. Write jaxcomm.chain there as well"):
        judge(chain(optax.chain(topk, clip), sgd))


def test_clipping_after_ef21_loses_nothing():
    assert judge(chain(jc.ef21(0.9), clip, sgd)) == []


def test_a_link_is_tried_on_numbers_of_every_leaf():
    tried = try_link(parts(clip, optax.adam(0.1)), PARAMS)
    assert tried.cuts == tried.mixes == {"['w']"}
    assert tried.forgets_size == tried.descends == tried.has_momentum == {"['b']"}
    assert tried.changes == {"['b']"}
    assert try_link(decay_w, PARAMS).decays == {"['w']"}
    assert try_link(of_a_user(clip), PARAMS) is None


def test_of_many_leaves_some_are_tried_with_and_without_a_mask_of_their_structure():
    params = {f"{i:02}": np.ones(3 if i % 2 else (3, 3), np.float32) for i in range(40)}
    odd = {name: int(name) % 2 == 1 for name in params}
    alone = try_link(optax.clip(1.0), params).cuts
    assert len(alone) == 16
    assert try_link(masked(optax.clip(1.0), odd), params).cuts == {path for path in alone if int(path[2:4]) % 2}
    with pytest.raises(ValueError, match=CLIPPED):
        jc.simulate(loss_fn, chain(dct, masked(clip, odd), sgd), 2).init(params)
    jc.simulate(loss_fn, chain(dct, adam, masked(clip, odd)), 2).init(params)


def test_init_state_refuses_and_warns_where_it_is_called():
    with pytest.raises(ValueError, match=STATE):
        jc.simulate(loss_fn, chain(optax.trace(0.9), dct, scale), 2).init(PARAMS)
    with pytest.warns(UserWarning, match=RATE) as caught:
        jc.simulate(loss_fn, chain(scale, dct), 2).init(PARAMS)
    assert [warning.filename for warning in caught] == [__file__]


# The reasons for the rules.


def trained(tx):
    rng = np.random.default_rng(0)
    state, step = init_state(PARAMS, tx, 2), jc.simulate(loss_fn, tx, 2)
    for _ in range(4):
        batch = {"x": rng.normal(size=(4, 300)) * 0.01, "y": rng.normal(size=(4, 3))}
        state, _ = step(state, jax.tree.map(np.float32, batch))
    return state.params


def test_decay_between_an_exchange_and_momentum_is_that_of_dense_sgd():
    momentum, strong = optax.sgd(0.01, momentum=0.9), optax.add_decayed_weights(0.1)
    dense = trained(chain(strong, plump, momentum))
    everything = jc.topk(0.0, value_dtype="float32", dense_below=0)
    for tx in (chain(plump, strong, momentum), chain(everything, strong, momentum)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), trained(tx), dense)
    assert not np.allclose(trained(chain(plump, momentum))["w"], dense["w"], rtol=1e-3)


def applied_and_owed(tx, steps=20):
    """What a single worker has applied after some gradients of norm 1, and its residual."""
    state, applied = tx.init({"w": np.zeros(1024, np.float32)}), 0.0
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, None), out_axes=(0, 0), axis_name="data"))
    for _ in range(steps):
        means, state = step({"w": np.full((1, 1024), 1 / 32, np.float32)}, state)
        state = jax.tree.map(lambda rows: rows[0], state)
        applied += float(means["w"].sum())
    return applied + sum(float(s.residual.rows.sum()) for s in state if getattr(s, "residual", None) is not None)


def test_clipping_after_error_feedback_loses_gradients_and_clipping_before_it_does_not():
    """Each gradient passes the clip unchanged, but the mean of accumulated ones has a larger norm."""
    topk = jc.topk(0.9, value_dtype="float32", dense_below=0)
    np.testing.assert_allclose(applied_and_owed(chain(clip, topk)), 20 * 32, rtol=1e-5)
    assert applied_and_owed(chain(topk, clip)) < 0.9 * 20 * 32


def test_decay_behind_momentum_correction_is_weaker_than_l2():
    """In one worker, with momentum before the exchange like dgc's: what a constant decay adds up to."""

    def total(*links):
        tx, params = chain(*links), jnp.ones(1)
        state, moved = tx.init(params), 0.0
        for _ in range(200):
            update, state = tx.update(jnp.zeros(1), state, params)
            moved += float(update[0])
        return moved

    within, behind = total(decay, optax.trace(0.9)), total(optax.trace(0.9), decay)
    assert within / behind == pytest.approx(10, rel=0.1)
