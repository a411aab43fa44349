"""Chains from methods' fields: in order, with the experiment's momentum and decay, for every method."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from configs.experiment import BoundaryFields
from configs.methods import (
    DctDp,
    Demo,
    Dgc,
    Iwp,
    LocalSgd,
    Method,
    PlumpDp,
    PowerSgd,
    QuantDp,
    SlimDp,
    SparseLoco,
    TopK,
)
from jaxcomm.state import communication_period
from tests.jaxcomm.train_steps import init_state, warnings_of
from tests.refusals import refused
from tests.train.runs import EXPERIMENT
from train.loop import describe
from train.methods import is_rare, make_chain, make_exchange, run_name

OTHERS = [
    PlumpDp(p=3),
    LocalSgd(exchange_sparsity=0.9),
    LocalSgd(exchange="pulse", exchange_sparsity=0.9),
    LocalSgd(fragments=2, overlap=5, mix=0.5),
]
METHODS = [*(method() for method in get_args(Method)), *OTHERS]
SHAPES = {"w": jax.ShapeDtypeStruct((64, 64), np.float32), "b": jax.ShapeDtypeStruct((64,), np.float32)}


@pytest.mark.parametrize(
    ("method", "decay"),
    [
        *((method, "decoupled") for method in METHODS),
        *((method, "l2") for method in (PlumpDp(), Dgc(), Demo(), SlimDp())),
    ],
    ids=lambda case: case if isinstance(case, str) else run_name(case),
)
def test_order_and_bytes_of_chains(method, decay):
    """The experiment's momentum and decay are not 0, so that their order matters."""
    assert EXPERIMENT.momentum > 0
    assert EXPERIMENT.weight_decay > 0
    tx = make_chain(dataclasses.replace(EXPERIMENT, decay=decay), method)
    warnings = warnings_of(tx, SHAPES, 4)
    is_weak = decay == "decoupled" and isinstance(method, Dgc | Iwp)  # momentum is over when the mean comes back
    is_normalised = decay == "l2" and isinstance(method, Demo)  # by the sign
    expected = ["none of its momentum"] * is_weak + ["is L2, which"] * is_normalised
    assert len(warnings) == len(expected)
    assert all(text in message for text, message in zip(expected, warnings, strict=True))
    report = jc.wire_report(tx, SHAPES, 4)
    assert 0 < report.received <= report.dense
    assert (report.received < report.dense) == (method != PlumpDp())
    state = jax.eval_shape(tx.init, SHAPES)
    assert communication_period(state) == method.period


@pytest.mark.parametrize("method", get_args(Method))
def test_names_of_factories(method):
    """Which is the name that a user would write."""
    assert callable(getattr(jc, method.name))
    state = jax.eval_shape(make_exchange(method(), momentum=0.5).init, SHAPES)
    assert state.method.name == (LocalSgd if method is SparseLoco else method).name  # which has its settings


def test_names():
    checked = PlumpDp(value_dtype="bfloat16", checksum=True)
    methods = (PlumpDp(), PlumpDp(p=4), PlumpDp(value_dtype="bfloat16"), checked, SlimDp(p=4))
    assert [run_name(method) for method in methods] == [
        "plump_dp",
        "plump_dp-p4",
        "plump_dp-bfloat16",
        "plump_dp-checksum-bfloat16",
        "slim_dp",
    ]


def test_names_of_boundaries():
    """Otherwise a pipeline of plump_dp would write into the folder of its baseline, whose boundary sends everything."""
    assert [
        run_name(PlumpDp(), boundary)
        for boundary in (
            BoundaryFields(),
            BoundaryFields(0.9),
            BoundaryFields(0.95, "float32"),
            BoundaryFields(value_dtype="int4"),
            BoundaryFields(rank=16),
            BoundaryFields(value_dtype="int4", rank=16),
            BoundaryFields(0.5, rank=16),
        )
    ] == [
        "plump_dp",
        "plump_dp-masked-0.9",
        "plump_dp-masked-0.95-float32",
        "plump_dp-masked-0-int4",
        "plump_dp-rank-16",
        "plump_dp-rank-16-int4",
        "plump_dp-rank-16-masked-0.5",
    ]
    assert run_name(PlumpDp(p=2), BoundaryFields(0.5)) == "plump_dp-p2-masked-0.5"


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        *((method, "adam") for method in (PlumpDp(), TopK(), QuantDp(), PowerSgd(), SlimDp(), Demo(), Dgc(), Iwp())),
        *((method, "muon") for method in (TopK(), Dgc(), LocalSgd())),
    ],
    ids=lambda case: case if isinstance(case, str) else run_name(case),
)
def test_adam_and_muon(method, optimizer):
    experiment = dataclasses.replace(EXPERIMENT, optimizer=optimizer)
    if isinstance(method, Demo | Dgc | Iwp):
        with pytest.raises(ValueError, match=f"which has momentum inside; got {optimizer}"):
            make_chain(experiment, method)
        return
    tx = make_chain(experiment, method)
    assert warnings_of(tx, SHAPES, 4) == []
    assert jc.wire_report(tx, SHAPES, 4) == jc.wire_report(make_chain(EXPERIMENT, method), SHAPES, 4)


@pytest.mark.parametrize(
    ("method", "exchange"), [(TopK(sparsity=0.9), jc.topk(0.9)), (Dgc(sparsity=0.9), jc.dgc(0.9))], ids=["topk", "dgc"]
)
def test_partial_compression(method, exchange):
    """Momentum correction has its momentum in the dense part as well."""
    chain = make_chain(dataclasses.replace(EXPERIMENT, compress="w"), method)
    compressed = jc.wire_report(exchange, {"w": SHAPES["w"]}, 4).received
    assert jc.wire_report(chain, SHAPES, 4).received == compressed + 1.5 * 4 * 64


@pytest.mark.parametrize("method", [*METHODS[: -len(OTHERS)], PlumpDp(p=3)], ids=run_name)
def test_slices(method):
    experiment = dataclasses.replace(EXPERIMENT, slices=2)
    if method.period is not None:
        with pytest.raises(ValueError, match=f"With --slices workers must .*; got {run_name(method)}, whose"):
            make_chain(experiment, method)
        return
    if isinstance(method, PowerSgd):
        with pytest.raises(
            ValueError, match=r"--slices must be 1 with powersgd, .* shares of tensors, which are vectors"
        ):
            make_chain(experiment, method)
        return
    tx = make_chain(experiment, method)
    warnings = warnings_of(tx, SHAPES, (2, 3), axis_name=("slice", "data"))
    assert len(warnings) == isinstance(method, Dgc | Iwp)  # decoupled decay, which has none of their momentum
    report = jc.wire_report(tx, SHAPES, (2, 3), axis_name=("slice", "data"))
    share = 1366 + 22  # of 64 * 64 and 64 elements, rounded up
    counts = 2 * (2 / 3) * 4 * 5  # of workers that are here, and of what was exchanged, of all shares together
    assert report.received_over("data") == pytest.approx(2 * (2 / 3) * 4 * 3 * share + counts)
    dense = 2 * (1 / 2) * 4 * share
    assert 0 < report.received_over("slice") <= dense
    assert (report.received_over("slice") == dense) == (method == PlumpDp())


def test_adam_of_the_papers():
    """With a gradient of 1, a step is as long as the learning rate, and decay is AdamW's."""
    experiment = dataclasses.replace(
        EXPERIMENT, optimizer="adam", learning_rate=0.01, warmup_steps=0, schedule="constant", weight_decay=0.5
    )
    tx = make_chain(experiment, PlumpDp())
    params = {"w": jnp.full((4,), 2.0)}
    state = init_state(params, tx, 2)
    step = jc.simulate(lambda params, batch: (params["w"] * batch.mean()).sum(), tx, 2)
    state, _ = step(state, jnp.ones((2,)))
    np.testing.assert_allclose(state.params["w"], 2 - 0.01 * (1 + 0.5 * 2), rtol=1e-6)
    state, _ = step(state, jnp.zeros((2,)))
    first, second = 0.9 * 0.1 / (1 - 0.9**2), 0.98 * 0.02 / (1 - 0.98**2)
    before = 2 - 0.01 * (1 + 0.5 * 2)
    expected = before - 0.01 * (first / second**0.5 + 0.5 * before)
    np.testing.assert_allclose(state.params["w"], expected, rtol=1e-5)


def params_after(steps, method, gradients, start=2.0, **changes):
    """Parameters that were `start`, by name, after steps of these gradients, at rate 0.01 with decay 0.5."""
    plain = {"learning_rate": 0.01, "warmup_steps": 0, "schedule": "constant", "weight_decay": 0.5}
    tx = make_chain(dataclasses.replace(EXPERIMENT, **plain, **changes), method)
    state = init_state({name: jnp.full(g.shape, start) for name, g in gradients.items()}, tx, 2)
    step = jc.simulate(lambda p, batch: sum((p[name] * g).sum() for name, g in gradients.items()) * batch.mean(), tx, 2)
    for _ in range(steps):
        state, _ = step(state, jnp.ones((2,)))
    return jc.state.global_params(state)


def test_size_of_demo():
    after = params_after(1, Demo(k=1, sign_size=0.25), {"w": np.full((40, 40), -3.0), "b": np.full((4,), 7.0)})
    np.testing.assert_allclose(after["w"], 2 - 0.01 * (-0.25 + 0.5 * 2), rtol=1e-6)
    np.testing.assert_allclose(after["b"], 2 - 0.01 * (0.25 + 0.5 * 2), rtol=1e-6)


def test_size_of_muon():
    """Adam's first step is +-1; Muon's has a root mean square of about 0.2, like Adam's later steps."""
    gradient = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    options = {"optimizer": "muon", "nesterov": False}
    after = params_after(1, PlumpDp(), {"w": gradient, "b": np.full((4,), -7.0)}, **options)
    change = (2 - 0.01 * 0.5 * 2 - after["w"]) / 0.01
    assert 0.15 < np.sqrt(np.mean(np.square(change))) < 0.25
    np.testing.assert_allclose(change.T @ change, np.eye(32) * np.square(change).sum() / 32, atol=0.9)
    assert np.sum(change * gradient) > 0
    np.testing.assert_allclose(after["b"], 2 - 0.01 * (-1 + 0.5 * 2), rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (DctDp, {"life_span": 0}, "life_span"),
        (TopK, {"sparsity": -0.1}, "sparsity"),
        (SlimDp, {"alpha": 0.1}, "beta"),
        (LocalSgd, {"exchange_sparsity": 1.5}, "sparsity"),
        (LocalSgd, {"exchange": "pulse"}, "exchange_sparsity"),
        (Iwp, {"alpha": 0.0}, "alpha"),
        (Demo, {"sign_size": 0.0}, "sign_size must be a positive number"),
        (PlumpDp, {"p": 0}, "p must"),
    ],
)
def test_bad_options(method, options, message):
    with pytest.raises(ValueError, match=message):
        method(**options)


def by_hand(gradient, decay, momentum, nesterov, steps=60):
    """A parameter that was 1 by hand, as in PyTorch's SGD and in SGDW."""
    w, u = 1.0, 0.0
    for _ in range(steps):
        g = gradient / 4 + (0.5 * w if decay == "l2" else 0)
        u = momentum * u + g
        update = g + momentum * u if nesterov else u
        w -= 0.01 * (update + (0.5 * w if decay == "decoupled" else 0))
    return w


LOCAL = [SlimDp(alpha=0.9, beta=0.9), LocalSgd(steps=2, outer_learning_rate=1.0, outer_momentum=0.0)]


@pytest.mark.parametrize(
    ("method", "decay", "nesterov"),
    [
        *((method, "decoupled", True) for method in (PlumpDp(), Dgc(), Iwp(), *LOCAL)),
        *((method, "l2", False) for method in (PlumpDp(), Dgc(), *LOCAL)),
        (PlumpDp(), "l2", True),
    ],
    ids=lambda case: case if isinstance(case, str) else str(case) if isinstance(case, bool) else run_name(case),
)
def test_momentum_and_decay(method, decay, nesterov):
    """Only decay, which is ten times as strong with L2 as when decoupled; then with a gradient."""
    inside = isinstance(method, Dgc | Iwp)  # their momentum is heavy-ball, whatever the experiment's is
    for gradient in (0.0, -3.0):
        expected = by_hand(gradient, decay, 0.9, nesterov and not inside)
        options = {"momentum": 0.9, "nesterov": nesterov, "decay": decay}
        result = params_after(60, method, {"w": np.full(4, gradient / 4)}, start=1.0, **options)
        assert float(result["w"][0]) - 1 == pytest.approx(expected - 1, rel=1e-4)


def test_l2_of_reduced_gradients():
    """To one worker's copy or to the mean, as parameters are replicated."""
    experiment = dataclasses.replace(EXPERIMENT, decay="l2", weight_decay=0.5, warmup_steps=0)
    x = jnp.asarray([[1.0, 2.0], [3.0, -4.0]])
    params = {"late": jnp.asarray([[0.3, -0.2], [0.5, 0.7]]), "own": jnp.asarray([0.1, 0.2])}

    def ended(late):
        tx = make_chain(experiment, PlumpDp(), late)
        state = init_state(params, tx, 2)

        def loss(params, batch):
            hidden = jc.late_multiply(batch, params["late"], mode="late") if late else batch @ params["late"]
            return (hidden * params["own"]).mean()

        step = jc.simulate(loss, tx, 2)
        for _ in range(5):
            state, _ = step(state, x)
        return state.params

    mask = ended(lambda path, leaf: path != "late")
    for name, leaf in ended(None).items():
        np.testing.assert_allclose(mask[name], leaf, rtol=1e-5)


def test_schedules_of_thresholds():
    """Two steps with an importance between two thresholds: at 0.1 all is sent, at 10 nothing."""
    method = Iwp(alpha=(0.1, 10.0), change_at=(1,), random_selection=False, density=1.0)
    tx = optax.chain(make_exchange(method, momentum=0.0), optax.sgd(0.0))
    state = init_state({"w": jnp.ones((1024,))}, tx, 2)
    step = jc.simulate(lambda params, batch: 2 * params["w"].sum() * batch.mean(), tx, 2)
    payloads = []
    for _ in range(3):
        state, metrics = step(state, jnp.ones((2,)))
        payloads.append(int(metrics["sent"]))
    assert payloads == [2 * 1024, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": (1.0, 2.0)}, "got (1.0, 2.0) with change_at=()"),
        ({"alpha": (1.0, 2.0), "change_at": (3, 5)}, "change_at=(3, 5)"),
        ({"alpha": (1.0, 2.0, 3.0), "change_at": (5, 3)}, "change_at=(5, 3)"),
        ({"alpha": (1.0, 2.0), "change_at": (0,)}, "change_at=(0,)"),
        ({"alpha": (1.0, 0.0), "change_at": (3,)}, "got (1.0, 0.0)"),
        ({"alpha": (1.0, np.nan), "change_at": (3,)}, "got (1.0, nan)"),
        ({"beta": (0.0, -1.0), "change_at": (3,)}, "got (0.0, -1.0)"),
    ],
)
def test_bad_thresholds(options, message):
    refused(lambda: Iwp(**options), f"{next(iter(options))} must be ", message)
    refused(lambda: Iwp(alpha=0.01, change_at=(3,)), "change_at must go with several", "got (3,) with alpha=0.01")


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (SlimDp(p=1, q=3), [3, 6, 9]),
        (SlimDp(p=2, q=2), [4, 8]),
        (Dgc(warmup_steps=2), [1, 2]),
        (Iwp(warmup_steps=1), [1]),
        (TopK(start=3), [1, 2, 3]),
        (Dgc(), []),
        (DctDp(), []),
        (LocalSgd(steps=2), []),
    ],
)
def test_the_most_expensive_steps(method, steps):
    assert [step for step in range(1, 10) if is_rare(method, step)] == steps


def test_no_momentum_no_copy():
    params = {"table": jnp.zeros((1000, 8))}
    for momentum, copies in ((0.0, 0), (0.9, 1)):
        state = make_chain(dataclasses.replace(EXPERIMENT, momentum=momentum), PlumpDp()).init(params)
        assert sum(leaf.size for leaf in jax.tree.leaves(state)) // 8000 == copies


def test_new_fields_in_records():
    """So that runs and checkpoints from before go on."""
    before = describe(EXPERIMENT, TopK())
    new = {
        "pipeline_schedule",
        "delay",
        "fsdp",
        "boundary.rank",
        *(f"method.{name}" for name in ("residual_dtype", "start")),
    }
    assert not new & set(before)
    assert "method.collective" not in describe(EXPERIMENT, PlumpDp())
    assert describe(EXPERIMENT, QuantDp(collective="two_shot"))["method.collective"] == "two_shot"
    variant = {"pipeline_schedule": "1f1b", "delay": 1, "fsdp": 2, "boundary": BoundaryFields(rank=4)}
    variant = dataclasses.replace(EXPERIMENT, **variant)
    after = describe(variant, TopK(residual_dtype="bfloat16", start=5))
    fields = {"pipeline_schedule": "1f1b", "delay": 1, "fsdp": 2, "boundary.rank": 4}
    assert after == before | fields | {"method.residual_dtype": "bfloat16", "method.start": 5}


def test_records_of_few_bits():
    """Records of before tiles had zero points are of another codec, and are not taken for this one's."""
    few = dataclasses.replace(EXPERIMENT, boundary=BoundaryFields(value_dtype="int4"))
    before, after = (describe(experiment, TopK()) for experiment in (EXPERIMENT, few))
    assert after == before | {"boundary.value_dtype": "int4", "boundary.format": 2}
