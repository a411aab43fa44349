"""Whether the links of Optax and of this library are found in their closures: else the check sees and says nothing."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import chain

import jaxcomm as jc
from jaxcomm.parallel.chain import EXCHANGES, LOCAL_EXCHANGES, chain_links

PARAMS = {"b": np.ones(3, np.float32), "w": np.arange(900, dtype=np.float32).reshape(300, 3)}
MASK = {"b": False, "w": True}
SCHEDULE = optax.linear_schedule(0.1, 0.0, 100)

scale, topk = optax.scale(-0.1), jc.topk(0.9)
clip, trace = optax.clip_by_global_norm(1.0), optax.trace(0.9)
jitted = optax.GradientTransformation(topk.init, jax.jit(topk.update))
partial = optax.GradientTransformation(topk.init, functools.partial(topk.update, params=None))
labelled = optax.partition({"l": optax.adam(0.1), "s": scale}, {"b": "s", "w": "l"})

# A release of Optax that is built differently fails here first.
READ_AS = {
    "sgd": (optax.sgd(0.1), "identity scale"),
    "sgd, momentum": (optax.sgd(SCHEDULE, momentum=0.9), "trace scale_by_schedule"),
    "adam": (optax.adam(0.1), "scale_by_adam scale"),
    "adamw": (optax.adamw(SCHEDULE, mask=MASK), "scale_by_adam add_decayed_weights scale_by_schedule"),
    "adafactor": (optax.adafactor(0.1), "scale_by_factored_rms clip_by_block_rms scale scale_by_param_block_rms scale"),
    "lamb": (optax.lamb(0.1), "scale_by_adam identity scale_by_trust_ratio scale"),
    "lion": (optax.lion(0.1), "scale_by_lion add_decayed_weights scale"),
    "rmsprop": (optax.rmsprop(0.1, momentum=0.9), "scale_by_rms scale trace"),
    "nested": (chain(clip, chain(topk, chain(scale))), "clip_by_global_norm topk scale"),
    "named": (optax.named_chain(("first", topk), ("second", optax.sgd(0.1))), "topk identity scale"),
    "masked": (optax.masked(chain(clip, trace), MASK), "clip_by_global_norm trace"),
    "freeze": (optax.freeze(MASK), "set_to_zero"),
    "partition": (labelled, "scale_by_adam['l'] scale['l'] scale['s']"),
    "selective": (optax.selective_transform(scale, freeze_mask=MASK), "scale['train'] set_to_zero['freeze']"),
    "injected": (optax.inject_hyperparams(optax.adamw)(SCHEDULE), "scale_by_adam add_decayed_weights scale"),
    "extra arguments": (optax.with_extra_args_support(chain(topk, scale)), "topk scale"),
    "flatten": (optax.flatten(optax.adam(0.1)), "scale_by_adam scale"),
    "finite": (optax.apply_if_finite(scale, 3), "scale apply_if_finite"),
    "some steps": (optax.conditionally_mask(scale, lambda step: step > 3), "scale"),
    "other steps": (optax.conditionally_transform(scale, lambda step: step > 3), "scale"),
    "MultiSteps": (optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 4), "trace scale MultiSteps"),
    "schedule-free": (optax.contrib.schedule_free(optax.sgd(0.1), 0.1), "identity scale schedule_free"),
    "complex": (optax.contrib.split_real_and_imaginary(trace), "trace"),
    "already mean": (jc.already_mean(topk, MASK), "topk"),
    "jitted": (jitted, "topk"),
    "partial": (partial, "topk"),
}


@pytest.mark.parametrize("case", READ_AS)
def test_optax_is_built_as_the_check_reads_it(case):
    tx, links = READ_AS[case]
    found = chain_links(tx, (), {})
    assert " ".join(map(str, found)) == links
    assert all(link.known for link in found)


def test_the_arguments_that_the_rules_ask_for_are_in_the_closures():
    tx = chain(optax.trace(0.3), optax.scale_by_adam(b1=0.4), optax.add_decayed_weights(0.5), optax.scale(-0.6))
    links = chain_links(tx, (), {})
    values = [link.args[name] for link, name in zip(links, ("decay", "b1", "weight_decay", "step_size"), strict=True)]
    assert values == [0.3, 0.4, 0.5, -0.6]
    (link,) = chain_links(optax.inject_hyperparams(optax.trace)(decay=0.7), (), {})
    assert link.args["decay"] == 0.7


ARGUMENTS = {
    "adaptive_grad_clip": (0.1,),
    "add_decayed_weights": (0.1,),
    "add_noise": (0.1, 0.5, 0),
    "clip": (1.0,),
    "clip_by_block_rms": (1.0,),
    "clip_by_global_norm": (1.0,),
    "ema": (0.9,),
    "monitor": ({"norm": optax.tree.norm},),
    "scale": (0.1,),
    "scale_by_learning_rate": (0.1,),
    "scale_by_schedule": (SCHEDULE,),
    "snapshot": ("norm", optax.tree.norm),
    "trace": (0.9,),
}
TAKE_THE_LOSS = (
    "polyak_sgd",
    "lbfgs",
    "scale_by_backtracking_linesearch",
    "scale_by_polyak",
    "scale_by_zoom_linesearch",
)


def made_by_optax():
    """What Optax's public factories make, by name; those that need more arguments are left out."""
    for name in sorted(set(optax.__all__) - set(TAKE_THE_LOSS)):
        factory = inspect.getattr_static(optax, name, None)  # deprecated names are no attributes
        if inspect.isfunction(factory):
            parameters = inspect.signature(factory).parameters.values()
            if name in ARGUMENTS or all(p.default is not p.empty for p in parameters):
                tx = factory(*ARGUMENTS.get(name, ()))
                if isinstance(tx, optax.GradientTransformation):
                    yield pytest.param(tx, id=name)


def depends_on_updates(tx):
    """Whether the state after a step differs between workers with different updates: by trying two."""
    updates = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), PARAMS)
    update = jax.vmap(tx.update, in_axes=(0, None, None), out_axes=(0, None))
    try:
        jax.eval_shape(update, updates, tx.init(PARAMS), PARAMS)
    except ValueError as error:
        assert "out_axes" in str(error), error  # noqa: PT017
        return True
    return False


@pytest.mark.parametrize("tx", list(made_by_optax()))
def test_what_is_refused_before_an_exchange_is_what_has_a_state_of_each_worker(tx):
    if depends_on_updates(tx):
        with pytest.raises(ValueError, match="The state of a chain is one for all workers"):
            jc.check_chain(chain(tx, jc.plump_dp()))
    else:
        assert jc.check_chain(chain(tx, jc.plump_dp())) == []


METHODS = [
    name
    for name in sorted(set(jc.__all__) - {"already_mean"})  # which is read as the method in it
    if inspect.isfunction(getattr(jc, name)) and getattr(jc, name).__module__.startswith("jaxcomm.methods.")
]


def make(name, **options):
    """A method with its own defaults; an argument without one is taken for an exchange."""
    parameters = inspect.signature(getattr(jc, name)).parameters.values()
    needed = {p.name: jc.topk(0.9) for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    return getattr(jc, name)(**{**needed, **options})


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_library_is_known_as_an_exchange(name):
    assert name in EXCHANGES
    with pytest.raises(ValueError, match="averages every gradient once"):
        jc.check_chain(chain(scale, make(name), jc.plump_dp()))


@pytest.mark.parametrize("name", sorted(set(METHODS) - LOCAL_EXCHANGES - {"hierarchical"}))
def test_what_may_not_be_clipped_is_what_has_a_residual(name):
    tx = make(name)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tx.init(PARAMS))]
    if any("residual" in path for path in paths):
        with pytest.raises(ValueError, match="clipped before an exchange with error feedback"):
            jc.check_chain(chain(tx, clip, scale))
    else:
        assert jc.check_chain(chain(tx, clip, scale)) == []


@pytest.mark.parametrize("name", sorted({"dgc", "iwp"} & set(METHODS)))
def test_the_momentum_of_a_method_is_found(name):
    with pytest.raises(ValueError, match="Momentum is applied once"):
        jc.check_chain(chain(make(name, momentum=0.9), trace, scale))
    assert jc.check_chain(chain(make(name, momentum=0.0), trace, scale)) == []
