"""Every rule, with a chain that breaks it and the chain that its remedy makes."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax import masked

import jaxcomm as jc
from jaxcomm import chain
from jaxcomm.collectives.axis import in_axes_of_workers
from jaxcomm.order import check_chain, check_descent, check_states, try_link
from tests.jaxcomm.train_steps import init_state

PARAMS = {"b": np.ones(3, np.float32), "w": np.arange(900, dtype=np.float32).reshape(300, 3)}
W = {"b": False, "w": True}  # a mask


warned = {}


def judge(tx):
    """The warnings; a jaxcomm.chain gives them in its first init."""
    axes = ("slice", "data")  # a hierarchy's; others use one of them
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = jax.eval_shape(in_axes_of_workers(tx.init, (2, 2), axes), PARAMS)
    problems = check_chain(tx, state, PARAMS)
    if hasattr(tx, "links"):
        warned.setdefault(tx, [str(warning.message) for warning in caught])
        assert warned[tx] == problems
    return problems


def plain(tx):
    """The same chain as Optax's."""
    return optax.chain(*(plain(link) for link in tx.links)) if hasattr(tx, "links") else tx


def of_a_user(inner):
    """A transformation that fails when it is tried: only its state is known."""

    def update(updates, state, params=None, *, loss):
        return inner.update(updates, state, params)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def reporting(inner):
    def update(updates, state, params=None):
        jax.debug.callback(reported.append, optax.tree.norm(updates))
        return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


reported = []


def multi_steps(tx):
    return optax.MultiSteps(tx, 4).gradient_transformation()


def _whiten(updates, state, params=None):
    """As Kron does in its first steps: a preconditioner of 1 moves a little with each gradient, whatever its size."""
    momentum, scale = state
    momentum = jax.tree.map(lambda m, u: 0.9 * m + 0.1 * u, momentum, updates)
    scale = jax.tree.map(lambda s, u: s - 0.1 * s * (s * s * u * u - 1) / (s * s * u * u + 1), scale, updates)
    return jax.tree.map(lambda m, s: jnp.clip(s * s * m, -1.1, 1.1), momentum, scale), (momentum, scale)


whitening = optax.GradientTransformation(
    lambda params: (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.ones_like, params)), _whiten
)


def parts(large, small):
    return optax.partition({"large": large, "small": small}, {"b": "small", "w": "large"})


def some_steps(tx):
    return optax.conditionally_transform(tx, lambda step: step > 3)


def noise(leaf):
    return jax.random.normal(jax.random.key(0), leaf.shape)


def dgc(momentum):
    return jc.dgc(momentum=momentum)


def iwp(momentum):
    return jc.iwp(momentum=momentum)


def hierarchical(method, *args, **options):
    return jc.hierarchical(method(*args, **options, axis_name="slice"))


def injected(make):
    return optax.inject_hyperparams(make)(rate=0.1)


def injected_sgd(**options):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.0, 1.0, 10), **options)


def clip_rows(updates, _):
    return jax.tree.map(lambda rows: jnp.mean(jnp.clip(rows, -1.0, 1.0), axis=0), updates)


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
    "state of NaN": (
        chain(optax.zero_nans(), topk, scale),
        r"got ZeroNansState.* Leave it out: where one worker has NaN, topk skips the step on all",
        chain(topk, scale),
    ),
    "state, injected": (chain(injected_sgd(momentum=0.9), dct), STATE, chain(dct, injected_sgd(momentum=0.9))),
    "state of a user": (chain(of_a_user(optax.trace(0.9)), dct), STATE, chain(of_a_user(clip), dct)),
    "momentum of dgc": (chain(dgc(0.9), heavy), MOMENTUM, chain(dgc(0.9), sgd)),
    "momentum of iwp": (chain(iwp(0.9), adam), MOMENTUM, chain(iwp(0), adam)),
    "momentum in a hierarchy": (
        chain(hierarchical(jc.dgc, momentum=0.9), heavy),
        MOMENTUM,
        chain(hierarchical(jc.dgc, momentum=0.0), heavy),
    ),
    "momentum in a named chain": (
        optax.named_chain(("mean", dgc(0.9)), ("sgd", heavy)),
        MOMENTUM,
        optax.named_chain(("sgd", dgc(0.9)), ("mean", sgd)),
    ),
    "state before an injected chain": (
        optax.chain(optax.trace(0.9), injected(lambda rate: optax.chain(dct, optax.sgd(rate)))),
        STATE,
        injected(lambda rate: optax.chain(dct, optax.sgd(rate, momentum=0.9))),
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
    "clip and Adam in a chain": (
        chain(dct, optax.chain(clip, optax.adamw(0.1))),
        CLIPPED,
        chain(optax.chain(clip), dct, optax.chain(optax.adamw(0.1), clip)),
    ),
    "clip and a schedule in a chain": (
        chain(sign, optax.chain(optax.clip(1.0), optax.lion(optax.linear_schedule(0.0, 1.0, 10)))),
        CLIPPED,
        chain(optax.clip(1.0), sign, optax.chain(optax.lion(optax.linear_schedule(0.0, 1.0, 10)))),
    ),
    "clip and Adagrad in a named chain": (
        chain(topk, optax.named_chain(("clip", rms), ("adagrad", optax.adagrad(0.1)))),
        CLIPPED,
        chain(topk, optax.named_chain(("adagrad", optax.adagrad(0.1)), ("clip", rms))),
    ),
    "clip and Adam, injected": (
        chain(topk, injected(lambda rate: optax.chain(clip, optax.adam(rate)))),
        CLIPPED,
        chain(clip, topk, injected(lambda rate: optax.adam(rate))),
    ),
    "momentum and clip in a chain": (
        chain(topk, optax.chain(heavy, optax.clip(1.0))),
        CLIPPED,
        chain(optax.clip(1.0), topk, optax.chain(heavy)),
    ),
    "clip of a part, with Adam": (
        chain(dct, parts(optax.chain(clip, adam), adam)),
        CLIPPED,
        chain(parts(clip, optax.identity()), dct, parts(adam, adam)),
    ),
    "clip, by a user who reports": (
        chain(dct, reporting(clip), sgd),
        CLIPPED,
        chain(reporting(clip), dct, reporting(optax.identity()), sgd),
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

OWN = r"before .* is that of each worker's own gradient, and not of the mean, as on one device: put it after"
NOISE = r"Noise before .* is the same on all workers, .* Put optax.add_noise after .* that of one device"
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
    "noise": (chain(optax.add_noise(0.1, 0.5, 0), dct, sgd), NOISE, chain(dct, optax.add_noise(0.1, 0.5, 0), sgd)),
    "noise in a plain chain": (
        optax.chain(optax.add_noise(0.1, 0.5, 0), plump, sgd),
        NOISE,
        optax.chain(plump, optax.add_noise(0.1, 0.5, 0), sgd),
    ),
    "noise for privacy": (
        chain(optax.contrib.differentially_private_aggregate(1.0, 0.1, 0), plump, sgd),
        NOISE,
        chain(plump, optax.noisy_sgd(0.1)),
    ),
    "noise of a user": (
        chain(optax.stateless(lambda updates, _: jax.tree.map(lambda u: u + noise(u), updates)), plump, sgd),
        NOISE,
        chain(plump, optax.stateless(lambda updates, _: jax.tree.map(lambda u: u + noise(u), updates)), sgd),
    ),
    "clip of a worker": (chain(clip, plump, adam), OWN, chain(plump, clip, adam)),
    "clip by parts": (
        chain(parts(clip, scale), jc.quant_dp(8), sgd),
        OWN,
        chain(jc.quant_dp(8), parts(clip, scale), sgd),
    ),
    "signs of a worker": (chain(optax.scale_by_sign(), plump, sgd), OWN, chain(plump, optax.scale_by_sign(), sgd)),
    "norm of a worker": (chain(optax.normalize_by_update_norm(), plump, sgd), OWN, chain(clip, topk, sgd)),
    "gradients of each row": (
        chain(clip, plump, sgd),
        OWN,
        chain(optax.stateless(clip_rows), plump, sgd),
    ),
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
    "what belongs to a local gradient": chain(decay, clip, optax.scale(0.5), dct, sgd),
    "optimizers that are linear in tiny gradients": chain(topk, optax.adagrad(0.1)),
    "another": chain(topk, optax.adadelta(0.1)),
    "an optimizer with a large epsilon": chain(topk, optax.adam(0.1, eps=1.0)),
    "an optimizer that clips what it has whitened": chain(topk, whitening, sgd),
    "a named chain": optax.named_chain(("mean", dct), ("adam", adam)),
    "hyperparameters around a chain": injected(lambda rate: chain(dct, optax.adam(rate))),
    "what may be a local optimizer": chain(of_a_user(sgd), slim),
    "what may not change updates": chain(sgd, slim, of_a_user(optax.identity())),
    "clip, by a user who is not understood": chain(dct, of_a_user(clip), sgd),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_broken_rules(rule):
    fault, message, remedied = REFUSED[rule]
    for way in (lambda tx: tx, plain, lambda tx: optax.chain(plain(tx))):
        with pytest.raises(ValueError, match=message):
            judge(way(fault))
        assert judge(way(remedied)) == []


@pytest.mark.parametrize("rule", UNUSUAL)
def test_warnings(rule):
    unusual, message, usual = UNUSUAL[rule]
    for way in (lambda tx: tx, plain):
        (warning,) = judge(way(unusual))
        assert re.search(message, warning), warning
        assert judge(way(usual)) == []


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) + jnp.sum(params["b"] ** 2)


# Of each kind of remedy one: where the exchange is, and what surrounds it.
ON_A_MESH = [
    "clip updates",
    "momentum in a hierarchy",
    "in apply_if_finite",
    "L2 and Adam",
    "in a mask",
    "state under a mask",
    "state of a wrapper",
    "state of steps",
    "ascent of models",
    "momentum of 0 in Adam",
    "rate, an array",
    "rate, injected",
    "rate in a hierarchy",
]


@pytest.mark.parametrize("rule", ON_A_MESH)
def test_remedies_run_on_a_mesh(rule):
    tx = {**REFUSED, **UNUSUAL}[rule][2]
    axes = {"slice": 2, "data": 2} if "hierarchy" in rule else {"data": 2}
    mesh, names = jc.make_mesh(**axes), tuple(axes) if len(axes) > 1 else "data"
    state = jax.eval_shape(lambda: init_state(PARAMS, tx, mesh, axis_name=names))
    batch = {"x": np.ones((4, 300), np.float32), "y": np.ones((4, 3), np.float32)}
    new, _ = jax.eval_shape(jc.make_train_step(loss_fn, tx, mesh, axis_name=names), state, batch)
    assert jax.tree.structure(new) == jax.tree.structure(state)


@pytest.mark.parametrize("case", FINE)
def test_chains_in_order(case):
    assert judge(FINE[case]) == []


def own_step(tx):
    """A step as written for one device."""

    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


@pytest.mark.parametrize("rule", ["twice", "state of momentum", "momentum of dgc"])
def test_rules_of_foreign_steps(rule):
    fault, message, remedied = BY_STATE[rule]
    mesh, batch = jc.make_mesh(data=2), {"x": np.ones((4, 300), np.float32), "y": np.ones((4, 3), np.float32)}
    for tx in (plain(remedied), plain(fault)):
        state = jax.eval_shape(tx.init, PARAMS)
        trace = functools.partial(jc.data_parallel(own_step(tx), mesh, batch=2).trace, PARAMS, state, batch)
        if tx is plain(remedied):
            trace()
    with pytest.raises(ValueError, match=message):
        trace()


def test_init_warns_once():
    params = jax.tree.map(jnp.asarray, PARAMS)
    tx = chain(scale, dct)
    with pytest.warns(UserWarning, match=RATE) as caught:
        tx.init(params)
    assert [warning.filename for warning in caught] == [__file__]
    tx.init(params)
    mesh = jc.make_mesh(data=2)
    for init in (jax.jit, jax.vmap, lambda f: jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())):
        members = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
        with pytest.raises(ValueError, match=CLIPPED):
            init(chain(dct, optax.chain(optax.clip_by_global_norm(0.5 + len(caught)), adam)).init)(members)


def test_trials_report_nothing():
    reported.clear()
    tx = chain(reporting(clip), dct, sgd)
    tx.init(jax.tree.map(jnp.asarray, PARAMS))
    jax.effects_barrier()
    assert not reported
    assert try_link(reporting(clip), PARAMS) == try_link(clip, PARAMS)


def test_links_that_call_the_host():
    calls = []

    def update(updates, state, params=None):
        rate = jax.pure_callback(lambda: calls.append(1) or np.float32(0.1), jax.ShapeDtypeStruct((), jnp.float32))
        return jax.tree.map(lambda u: -rate * u, updates), state

    assert try_link(optax.GradientTransformation(sgd.init, update), PARAMS) is None
    assert not calls


CLIMBING = {
    "an exchange alone": dct,
    "a chain of an exchange": chain(topk),
    "a clip": chain(clip, topk),
    "no learning rate": chain(topk, optax.scale_by_adam()),
    "no learning rate in Optax's chain": optax.chain(topk, optax.scale_by_adam()),
}


@pytest.mark.parametrize("tx", CLIMBING.values(), ids=CLIMBING)
def test_a_step_that_climbs(tx):
    mesh = jc.make_mesh(data=2)
    steps = [jc.simulate(loss_fn, tx, 2), jc.make_train_step(loss_fn, tx, mesh)]
    if tx.init is dct.init or len(getattr(tx, "links", ())) == 1:
        steps.append(jc.make_train_step(loss_fn, tx, mesh, specs=P()))
    for step in steps:
        state = step.shapes(PARAMS)
        with pytest.raises(ValueError, match=r"got .* and no learning rate: .* Write jaxcomm.chain\(.*optax.sgd"):
            jax.eval_shape(step, state, BATCH)
    jax.eval_shape(jax.vmap(tx.init), jax.tree.map(lambda leaf: leaf[None], PARAMS))  # of a loop of one's own


@pytest.mark.parametrize(
    "last",
    [
        optax.scale_by_learning_rate(optax.join_schedules([lambda step: 0.0, lambda step: 0.1], [100])),
        injected_sgd(),
        optax.inject_hyperparams(optax.sgd)(0.0),
        optax.chain(optax.scale(-1.0), optax.scale_by_schedule(schedule)),
        optax.contrib.sam(sgd, optax.chain(optax.contrib.normalize(), sgd), sync_period=2),
        of_a_user(sgd),
    ],
    ids=["zeros", "warm-up", "set later", "scales", "sam", "unknown"],
)
def test_a_step_that_may_descend(last):
    check_descent(chain(topk, last), None, PARAMS)


def test_links_of_a_chain():
    tx = chain(clip, chain(dct, adam))
    assert tx.links == (clip, dct, adam)
    assert isinstance(tx, optax.GradientTransformation)
    optax_chain = optax.chain(clip, dct, adam)
    assert jax.tree.structure(tx.init(PARAMS)) == jax.tree.structure(optax_chain.init(PARAMS))


def test_links_of_an_inner_chain():
    with pytest.raises(ValueError, match=r"got topk in an optax.chain inside it. Write jaxcomm.chain there as well"):
        judge(chain(optax.chain(topk, clip), sgd))


def test_clipping_after_ef21():
    assert judge(chain(jc.ef21(0.9), clip, sgd)) == []


def test_trials_have_numbers_in_every_leaf():
    tried = try_link(parts(clip, optax.adam(0.1)), PARAMS)
    assert tried.cuts == tried.mixes == {"['w']"}
    assert not tried.couples
    assert try_link(optax.clip_by_global_norm(1.0), PARAMS).couples == {"['b']", "['w']"}
    assert tried.forgets_size == tried.descends == tried.has_momentum == {"['b']"}
    assert tried.changes == {"['b']"}
    assert try_link(decay_w, PARAMS).decays == {"['w']"}
    assert try_link(of_a_user(clip), PARAMS) is None


def test_trials_of_many_leaves():
    params = {f"{i:02}": np.ones(3 if i % 2 else (3, 3), np.float32) for i in range(40)}
    odd = {name: int(name) % 2 == 1 for name in params}
    cuts = try_link(optax.clip(1.0), params).cuts
    assert len(cuts) == 16
    assert try_link(masked(optax.clip(1.0), odd), params).cuts == {path for path in cuts if int(path[2:4]) % 2}
    with pytest.raises(ValueError, match=CLIPPED):
        jc.simulate(loss_fn, chain(dct, masked(clip, odd), sgd), 2).init(params)
    jc.simulate(loss_fn, chain(dct, adam, masked(clip, odd)), 2).init(params)


def test_init_state_warns_where_it_is_called():
    with pytest.raises(ValueError, match=STATE):
        jc.simulate(loss_fn, chain(optax.trace(0.9), dct, scale), 2).init(PARAMS)
    with pytest.warns(UserWarning, match=RATE) as caught:
        jc.simulate(loss_fn, chain(scale, dct), 2).init(PARAMS)
    assert [warning.filename for warning in caught] == [__file__]


FROZEN = jc.topk(0.5, where="w", others=optax.set_to_zero())
BATCH = {"x": np.ones((4, 300), np.float32), "y": np.ones((4, 3), np.float32)}


@pytest.mark.parametrize("make", [chain, optax.chain], ids=["jaxcomm.chain", "optax.chain"])
def test_frozen_with_decay(make):
    tx = make(FROZEN, optax.adamw(0.1, weight_decay=0.5))
    step = jc.simulate(loss_fn, tx, 2)
    state, _ = step(step.init(PARAMS), BATCH)
    np.testing.assert_array_equal(state.params["b"], PARAMS["b"])
    assert not np.array_equal(state.params["w"], PARAMS["w"])


def test_frozen_in_foreign_steps_and_shards():
    tx, mesh = chain(FROZEN, optax.adamw(0.1, weight_decay=0.5)), jc.make_mesh(data=2)
    new, _, _ = jc.data_parallel(own_step(tx), mesh, batch=2)(PARAMS, tx.init(PARAMS), BATCH)
    sharded = jc.make_train_step(loss_fn, tx, jc.make_mesh(data=2, model=3), specs=P("model"), auto=("model",))
    state, _ = sharded(sharded.init(PARAMS), BATCH)
    for params in (new, state.params):
        np.testing.assert_array_equal(params["b"], PARAMS["b"])
        assert not np.array_equal(params["w"], PARAMS["w"])


def test_frozen_in_an_optax_chain():
    tx, mesh = optax.chain(FROZEN, optax.adamw(0.1, weight_decay=0.5)), jc.make_mesh(data=2)
    step = jc.data_parallel(own_step(tx), mesh, batch=2)
    with pytest.warns(UserWarning, match=r"Frozen parameters .* topk; got an optax.chain.* Write jaxcomm.chain"):
        step(PARAMS, tx.init(PARAMS), BATCH)


def test_frozen_behind_an_exchange():
    (message,) = judge(chain(plump, parts(sgd, zero)))
    assert re.search(r"plump_dp exchanges .* no updates: \['b'\]\. Freeze them by", message)
    assert judge(chain(FROZEN, parts(sgd, zero))) == []


def test_links_without_arguments():
    sloppy = optax.GradientTransformationExtraArgs(sgd.init, lambda updates, state, params=None: (updates, state))
    for make in (chain, optax.chain):
        step, plain_step = (
            jc.make_train_step(loss_fn, tx, jc.make_mesh(data=2)) for tx in (make(topk, sloppy, sgd), make(topk, sgd))
        )
        result, expected = (step.report(step.shapes(PARAMS), BATCH).received for step in (step, plain_step))
        assert result == expected


@pytest.mark.parametrize("make", [chain, optax.chain], ids=["jaxcomm.chain", "optax.chain"])
def test_optax_maps_parameters(make):
    tx = make(FROZEN, adam)
    state = tx.init(PARAMS)
    mapped = optax.tree_map_params(tx, lambda leaf: leaf + 5, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, mapped[0], state[0])
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 5), (mapped[1][0].mu, mapped[1][0].nu))


def test_complex_parameters():
    tx = optax.contrib.split_real_and_imaginary(chain(plump, sgd))
    params = {"w": np.arange(8, dtype=np.complex64) * 1j}

    def loss(params, batch):
        return jnp.mean(jnp.abs(batch @ params["w"] - 1) ** 2)

    def step(params, state, batch):
        gradients = jax.tree.map(jnp.conj, jax.grad(loss)(params, batch))
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    batch = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    with pytest.raises(ValueError, match=r"must be real .* got split_real_and_imaginary .* jaxcomm.data_parallel"):
        jc.simulate(loss, tx, 2).init(params)
    new, _ = jc.data_parallel(step, jc.make_mesh(data=2), batch=2)(params, tx.init(params), batch)
    expected = params["w"] - 0.1 * np.conj(jax.grad(loss)(params, batch)["w"])
    np.testing.assert_allclose(new["w"], expected, rtol=1e-5, atol=1e-6)


def test_two_chains_in_a_state():
    two = {"each": (optax.chain(topk, sgd).init(PARAMS), optax.chain(dct, adam).init(PARAMS))}
    assert check_states((PARAMS, topk.init(PARAMS), two)) == []


# The reasons for the rules.


def trained(tx):
    rng = np.random.default_rng(0)
    state, step = init_state(PARAMS, tx, 2), jc.simulate(loss_fn, tx, 2)
    for _ in range(4):
        batch = {"x": rng.normal(size=(4, 300)) * 0.01, "y": rng.normal(size=(4, 3))}
        state, _ = step(state, jax.tree.map(np.float32, batch))
    return state.params


@pytest.mark.slow
def test_decay_before_momentum():
    momentum, strong = optax.sgd(0.01, momentum=0.9), optax.add_decayed_weights(0.1)
    dense = trained(chain(strong, plump, momentum))
    full = jc.topk(0.0, value_dtype="float32", dense_below=0)
    for tx in (chain(plump, strong, momentum), chain(full, strong, momentum)):
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


@pytest.mark.slow
def test_clipping_around_error_feedback():
    """Each gradient passes the clip unchanged, but the mean of accumulated ones has a larger norm."""
    topk = jc.topk(0.9, value_dtype="float32", dense_below=0)
    np.testing.assert_allclose(applied_and_owed(chain(clip, topk)), 20 * 32, rtol=1e-5)
    assert applied_and_owed(optax.chain(topk, clip)) < 0.9 * 20 * 32  # a jaxcomm.chain refuses it


def test_decay_after_momentum_correction():
    """In one worker, with momentum before the exchange like dgc's: what a constant decay adds up to."""

    def total(*links):
        tx, params = chain(*links), jnp.ones(1)
        state, distance = tx.init(params), 0.0
        for _ in range(200):
            update, state = tx.update(jnp.zeros(1), state, params)
            distance += float(update[0])
        return distance

    inner, outer = total(decay, optax.trace(0.9)), total(optax.trace(0.9), decay)
    assert inner / outer == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"delay": 1}], ids=str)
@pytest.mark.parametrize("outer", [jc.chain, optax.chain], ids=["jaxcomm", "optax"])
def test_steps_of_an_inner_chain(options, outer):
    """The other links would see zeros, or a clip what has left a residual."""
    with pytest.raises(ValueError, match=r"must be those of the outermost chain; got .* Pass it to the outer chain"):
        judge(outer(jc.chain(jc.topk(0.5), **options), optax.adam(0.1)))
    with pytest.raises(ValueError, match="must be those of the outermost chain"):
        judge(outer(optax.clip(1.0), optax.chain(jc.chain(jc.topk(0.5), **options), optax.sgd(0.1))))
    judge(jc.chain(jc.chain(jc.topk(0.5), optax.adam(0.1)), **options))


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"delay": 1}], ids=str)
def test_chains_inside_hyperparameters(options):
    """The rules hold for what accumulates or waits inside optax.inject_hyperparams."""

    @optax.inject_hyperparams
    def tx(rate):
        return jc.chain(optax.trace(0.9), jc.topk(0.5), optax.sgd(rate), **options)

    with pytest.raises(ValueError, match=STATE):
        judge(tx(0.1))
