"""Plans: what is chosen, that a plan is executed as written, its file, and what it refuses."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.placement import Device, ModelBlock, Plan, make_plan, place, planning, read_plan
from jaxcomm.placement.solve import NotInTimeError, solve
from jaxcomm.planner import estimate
from jaxcomm.planner.dense_layers import LayerCost
from tests.refusals import refused

K = 4
PAGE = Path(__file__).parents[3] / "docs" / "waiting.md"
PARAMS = {
    "fc": {"kernel": jnp.zeros((300, 400)), "bias": jnp.zeros(400)},
    "head": {"kernel": jnp.zeros((400, 10)), "bias": jnp.zeros(10)},
}
METHODS = {"topk": jc.topk(0.99, dense_below=0), "sign": jc.sign(dense_below=0), "powersgd": jc.powersgd(2)}
MIXED = Plan(
    workers=K,
    cuts=(),
    tensors={
        "fc/bias": ((400,), "plump_dp"),
        "fc/kernel": ((300, 400), "topk"),
        "head/bias": ((10,), "plump_dp"),
        "head/kernel": ((400, 10), "powersgd"),
    },
    exchanges={
        "plump_dp": {"method": "plump_dp", "options": {}},
        "topk": {"method": "topk", "options": {"sparsity": 0.99}},
        "powersgd": {"method": "powersgd", "options": {"rank": 2}},
    },
    micro_batches=1,
    compute=0.1,
    boundaries=0.0,
    exchange_seconds=0.02,
)


def advice(rate=1e8, workers=K, **options):
    return estimate(PARAMS, workers, rate, latency=1e-4, compute=0.1, methods=METHODS, **options)


def plan(rate=1e8, **options):
    return make_plan(advice(rate), PARAMS, methods=METHODS, **options)


def test_links_decide():
    assert {name for _, name in plan(1e13).tensors.values()} <= {"plump_dp", "plump_dp(bfloat16)", "plump_dp(float16)"}
    slow = plan(1e6)
    assert slow.tensors["fc/kernel"][1] in METHODS
    assert slow.step < min(row.step for row in advice(1e6).predictions) * 1.001
    assert slow.compute == pytest.approx(0.1)


def test_no_slower_than_one_method():
    for rate in (1e6, 1e8, 1e9, 1e10, 1e12):
        fastest = min(row.step for row in advice(rate).predictions)
        assert plan(rate).step <= fastest * 1.001, rate


def test_the_budget():
    """On noise, the largest hundredth has a tenth of the squared norm, and two of 300 directions about the same."""
    assert {name for _, name in plan(1e6, error_budget=0.0).tensors.values()} == {"plump_dp"}
    free, half = plan(1e6), plan(1e6, error_budget=0.5)
    assert half.step > free.step
    assert half.tensors["fc/kernel"][1] in ("sign", "plump_dp(bfloat16)", "plump_dp")
    rows, columns = np.random.default_rng(0).standard_normal((2, 1, 300)), np.ones((2, 400, 1))
    low_rank = sum((columns[i] @ rows[i]).T for i in range(2)).astype(np.float32)
    gradient = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), PARAMS)
    gradient["fc"]["kernel"] = low_rank + np.float32(1e-3)
    exact = make_plan(advice(1e6), PARAMS, methods=METHODS, error_budget=0.05, gradient=gradient)
    assert exact.tensors["fc/kernel"][1] == "powersgd"  # all of this gradient has rank 2


def test_a_gradient_of_zeros():
    with pytest.raises(ValueError, match=r"gradient must be finite, and not zero everywhere; got .*whose sum is 0"):
        make_plan(advice(1e6), PARAMS, methods=METHODS, error_budget=0.1, gradient=jax.tree.map(jnp.zeros_like, PARAMS))


def test_a_plan_runs():
    tx = MIXED.transformation()
    random = np.random.default_rng(0)
    gradients = jax.tree.map(lambda leaf: random.standard_normal((K, *leaf.shape)).astype(np.float32), PARAMS)

    def first(tx):
        return jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g), g)[0], axis_name="data"))

    means = first(tx)(gradients)
    dense = first(jc.plump_dp())(gradients)
    topk = first(jc.topk(0.99))({"kernel": gradients["fc"]["kernel"]})
    low_rank = first(jc.powersgd(2))({"kernel": gradients["head"]["kernel"]})
    np.testing.assert_array_equal(means["fc"]["kernel"], topk["kernel"])
    np.testing.assert_allclose(means["head"]["kernel"], low_rank["kernel"], rtol=1e-5, atol=1e-6)
    for layer in ("fc", "head"):
        np.testing.assert_allclose(means[layer]["bias"], dense[layer]["bias"], rtol=1e-5, atol=1e-6)
    gradients["head"]["bias"][1, 3] = np.nan
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(first(tx)(gradients)))


def test_the_step_of_the_page(tmp_path, monkeypatch):
    """The step is run exactly as on the page; then it trains."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "read_plan(" in block]
    monkeypatch.chdir(tmp_path)
    MIXED.write(tmp_path / "plan.json")
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: 0.05 * random.standard_normal(leaf.shape).astype(np.float32), PARAMS)
    x = random.standard_normal((8, 300)).astype(np.float32)

    def loss_fn(params, x):
        hidden = jax.nn.relu(x @ params["fc"]["kernel"] + params["fc"]["bias"])
        return ((hidden @ params["head"]["kernel"] + params["head"]["bias"] - 1) ** 2).mean()

    names = {"jc": jc, "optax": optax, "Path": Path, "params": params, "batch": x, "loss_fn": loss_fn}
    exec(example, names | {"mesh": jc.make_mesh(data=K)}, namespace := {})
    step, state, losses = namespace["step"], namespace["state"], [float(namespace["metrics"]["loss"])]
    for _ in range(9):
        state, metrics = step(state, x)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


def test_files(tmp_path):
    file = tmp_path / "plan.json"
    MIXED.write(file)
    assert read_plan(file) == MIXED
    planned = plan(1e6)
    planned.write(file)
    assert read_plan(file).tensors == planned.tensors
    assert "plan for 4 workers: " in str(planned)
    record = json.loads(file.read_text())
    (name, (_, way)), *_ = record["tensors"].items()
    changes = [{"format": 0}, {"tensors": 3}, {"exchanges": {}}, {"more": 1}, {"compute": math.nan}, {"compute": "x"}]
    changes += [{"workers": "x"}, {"tensors": {name: [[-1], way]}}, {"tensors": {name: ["44", way]}}]
    changes += [{"exchanges": {way: {"method": "topk", "options": {"sparsity": 0.9, "where": "("}}}}]
    for change in changes:
        file.write_text(json.dumps(record | change))
        with pytest.raises(ValueError, match=r"A plan must be a file that `Plan\.write` made, of format 1; got"):
            read_plan(file)
    for text in (b"", b"[]", b"{}", b"[" * 9999, b"\xff\xfe"):
        file.write_bytes(text)
        with pytest.raises(ValueError, match="A plan must be a file"):
            read_plan(file)
    with pytest.raises(ValueError, match="A plan must be a file"):
        read_plan(tmp_path / "missing.json")


def test_another_model():
    MIXED.check(PARAMS, K)
    with pytest.raises(ValueError, match="must be for 4 workers; got 3"):
        MIXED.check(PARAMS, 3)
    with pytest.raises(ValueError, match="got a model without 'head/bias'"):
        MIXED.check(PARAMS | {"head": {"kernel": PARAMS["head"]["kernel"]}}, K)
    with pytest.raises(ValueError, match="got a model with 'tail'"):
        MIXED.check(PARAMS | {"tail": jnp.zeros(1)}, K)
    with pytest.raises(ValueError, match=r"got \(401,\) at 'fc/bias', planned as \(400,\)"):
        MIXED.check(PARAMS | {"fc": PARAMS["fc"] | {"bias": jnp.zeros(401)}}, K)


def layer(way, wire, computing=0.0, memory=0):
    tensors = ("fc/kernel", "fc/bias") if way == "late" else ("fc/kernel",)
    return LayerCost("fc", way, tensors, bytes=1.0, wire=wire, computing=computing, memory=memory)


def with_layers(*layers, rate=1e6):
    return dataclasses.replace(advice(rate), layers=list(layers))


def test_late_and_split_layers():
    free = plan(1e6)
    dear = make_plan(with_layers(layer("late", 1e3), layer("split", 1e3)), PARAMS, methods=METHODS)
    assert dear.tensors == free.tensors
    assert dear.dense_layers == "exchange"
    late = make_plan(with_layers(layer("late", 1e-6), layer("split", 1e3)), PARAMS, methods=METHODS)
    assert late.computed("late") == {"fc"}
    assert {late.tensors[path][1] for path in ("fc/kernel", "fc/bias")} == {"late"}
    assert late.dense_layers == "late"
    assert late.step < free.step
    split = make_plan(with_layers(layer("late", 1e3), layer("split", 1e-6)), PARAMS, methods=METHODS)
    assert split.tensors["fc/kernel"][1] == split.dense_layers == "split"
    assert split.tensors["fc/bias"][1] in split.exchanges  # replicated, so its gradient is exchanged
    spared = make_plan(with_layers(layer("split", 1e-6, computing=-0.01)), PARAMS, methods=METHODS)
    assert spared.step == pytest.approx(split.step - 0.01)
    # A layer that reduces its own gradient has no error, whatever the budget.
    exact = make_plan(with_layers(layer("late", 1e-6)), PARAMS, methods=METHODS, error_budget=0.0)
    assert exact.tensors["fc/kernel"][1] == "late"


def test_memory_splits_a_layer():
    """Of three copies of 300 x 400 numbers of 4 bytes, each of 4 workers then holds a quarter."""
    whole, shard = 4 * 3 * sum(leaf.size for leaf in jax.tree.leaves(PARAMS)), 4 * 300 * 400 * 3 // 4
    costs = with_layers(layer("split", 1e3, memory=shard))
    tight = make_plan(costs, PARAMS, methods={}, devices=[Device(memory=whole - 1)])
    assert tight.dense_layers == "split"
    make_plan(costs, PARAMS, methods={}, devices=[Device(memory=whole - 3 * shard + 100)])
    with pytest.raises(ValueError, match="memory"):
        make_plan(costs, PARAMS, methods={}, devices=[Device(memory=whole - 3 * shard - 100)])


def test_memory_of_a_whole_model():
    """Parameters, gradient and momentum, and the loss's memory without its parameters."""
    state, activations = 4 * sum(leaf.size for leaf in jax.tree.leaves(PARAMS)), 10_000
    facts = dataclasses.replace(advice(1e6), memory=state + activations)
    make_plan(facts, PARAMS, methods={}, devices=[Device(memory=3 * state + activations + 100)])
    with pytest.raises(
        ValueError, match=r"Every stage must fit into the memory of its device; got .*. Give the devices at least"
    ):
        make_plan(facts, PARAMS, methods={}, devices=[Device(memory=3 * state + activations - 100)])


@pytest.mark.parametrize("way", ["late", "split"])
def test_dense_layers_train(way):
    """Dense gradients and layers that reduce their own make the same steps, up to rounding."""
    reduced = ("fc/kernel", "fc/bias") if way == "late" else ("fc/kernel",)
    tensors = {path: (shape, way if path in reduced else "plump_dp") for path, (shape, _) in MIXED.tensors.items()}
    plan = dataclasses.replace(MIXED, tensors=tensors)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: 0.05 * random.standard_normal(leaf.shape).astype(np.float32), PARAMS)
    x = random.standard_normal((8, 300)).astype(np.float32)

    def train(way, tx, **options):
        def loss_fn(params, x):
            fc, head = params["fc"], params["head"]
            if way == "late":
                hidden = jc.late_multiply(x, fc["kernel"], fc["bias"], mode="late")
            elif way == "split":
                hidden = jc.layers.split_dense(x, fc["kernel"], fc["bias"])
            else:
                hidden = x @ fc["kernel"] + fc["bias"]
            return ((jax.nn.relu(hidden) @ head["kernel"] + head["bias"] - 1) ** 2).mean()

        step = jc.make_train_step(loss_fn, jc.chain(tx, optax.sgd(0.1)), jc.make_mesh(data=K), **options)
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, x)
        return step.params(state)

    specs = jax.tree.map(lambda _: P(), PARAMS)
    specs["fc"]["kernel"] = P(None, "data")
    options = {"specs": specs} if way == "split" else {}
    result, expected = train(way, plan.transformation(), **options), train("exchange", jc.plump_dp())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), result, expected)


def test_methods_beyond_a_file():
    class Mine(type(jc.planner.costs.method_of(jc.topk(0.9), PARAMS))):
        """A user's own method, with the name of another."""

    for tx in (jc.topk(0.9, where="kernel"), jc.topk(0.9, where="kernel", others=jc.sign()), Mine(0.9).transform()):
        methods = {"mine": tx}
        advice_of_methods = advise_of(methods)
        with pytest.raises(ValueError, match="so that its file can hold them; got 'mine'"):
            make_plan(advice_of_methods, PARAMS, methods=methods)


def advise_of(methods):
    """An advice about methods whose costs were not measured."""
    base = advice()
    rows = [dataclasses.replace(base.predictions[0], method=name) for name in methods]
    return dataclasses.replace(base, predictions=base.predictions + rows)


BLOCKS = [
    ModelBlock("fc", ("fc/bias", "fc/kernel"), 0.05, boundary_bytes=1000),
    ModelBlock("head", ("head/bias", "head/kernel"), 0.05),
]


def test_stages():
    planned = make_plan(
        advice(1e6), PARAMS, methods=METHODS, blocks=BLOCKS, devices=[Device(), Device(speed=2.0)],
        link_seconds_per_byte=[1e-6], link_seconds=[1e-4], micro_batches=4,
    )  # fmt: skip
    assert planned.cuts == (1,)
    assert len({name for _, name in planned.tensors.values()}) == 1
    assert planned.compute == pytest.approx((4 + 1) / 4 * 0.05)
    assert planned.boundaries == pytest.approx(2 * 4 * 1e-4 + 1000 * 1e-6)
    assert planned.rank is None


@pytest.mark.parametrize(("seconds_per_byte", "rank"), [(1e-6, 64), (9e-5, 8), (1.0, 1)])
def test_ranks(seconds_per_byte, rank):
    """Computing takes 0.0625 s, and r numbers are 80 r bytes."""
    blocks = [dataclasses.replace(BLOCKS[0], boundary_bytes={r: 80 * r for r in (1, 8, 64)}), BLOCKS[1]]

    def planned(blocks, **options):
        return make_plan(
            advice(1e6), PARAMS, methods=METHODS, blocks=blocks, micro_batches=4,
            **{"devices": [Device()] * 2, "link_seconds_per_byte": [seconds_per_byte], "link_seconds": [0.0]} | options,
        )  # fmt: skip

    plan = planned(blocks)
    assert plan.rank == rank
    assert plan.boundaries == pytest.approx(80 * rank * seconds_per_byte)
    assert f"with {rank} numbers between them" in str(plan)
    whole = {"devices": [Device()], "link_seconds_per_byte": [], "link_seconds": []}
    assert planned(blocks, **whole).rank is None
    others = [blocks[0], dataclasses.replace(blocks[1], boundary_bytes={8: 1})]
    refused(lambda: planned(others), "same", "{8}")


def blocks_of(workers):
    """Blocks with which a global batch takes one device 0.4 s."""
    return [dataclasses.replace(block, seconds=0.2 / workers) for block in BLOCKS]


def test_memory_makes_stages():
    def placed(memory):
        return place(
            4, PARAMS, lambda workers: advice(1e8, workers), blocks_of, methods=METHODS, seconds_per_byte=8e-8,
            latency=0.0, memory=memory,
        )  # fmt: skip

    assert placed(None).cuts == ()
    assert placed(None).workers == 4
    one_stage = 4 * 3 * sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    tight = placed(one_stage - 1)
    assert (tight.cuts, tight.workers) == ((1,), 2)
    with pytest.raises(ValueError, match="memory"):
        placed(1000)


@pytest.mark.parametrize(
    ("slowest", "is_proven"),
    [
        (None, True),
        (lambda best: dataclasses.replace(best, optimal=False, gap=1e-9), True),  # slower than the plan for sure
        (lambda best: dataclasses.replace(best, optimal=False, gap=1.0), False),
        (NotInTimeError("There was no time."), False),
        (ValueError("Nothing fits."), True),
    ],
)
def test_optimality(monkeypatch, slowest, is_proven):
    """With two stages each exchange for all is a problem of its own; the slowest one is not solved as it should be."""
    monkeypatch.setattr(planning, "solve", lambda problem, **_: solve(problem))

    def made():
        return make_plan(
            advice(1e6), PARAMS, methods=METHODS, blocks=BLOCKS, devices=[Device()] * 2,
            link_seconds_per_byte=[1e-6], link_seconds=[1e-4], micro_batches=4,
        )  # fmt: skip

    usual = made()
    assert usual.optimal

    def solved(problem, **_):
        best = solve(problem)
        if set(best.options.values()) == {"plump_dp"} and slowest is not None:
            if isinstance(slowest, ValueError):
                raise slowest
            return slowest(best)
        return best

    monkeypatch.setattr(planning, "solve", solved)
    assert made() == dataclasses.replace(usual, optimal=is_proven)


@pytest.mark.parametrize(("error", "is_proven"), [(NotInTimeError("No time."), False), (ValueError("No room."), True)])
def test_optimality_of_a_placement(monkeypatch, error, is_proven):
    def solved(problem, **_):
        if len(problem.devices) == 2:
            raise error
        return solve(problem)

    monkeypatch.setattr(planning, "solve", solved)
    placement = place(
        2, PARAMS, lambda workers: advice(1e6, workers), blocks_of, methods=METHODS, seconds_per_byte=1e-6, latency=0.0
    )
    assert (placement.workers, placement.optimal) == (2, is_proven)


def test_blocks():
    for blocks in (BLOCKS[:1], [*BLOCKS, BLOCKS[0]], [ModelBlock("other", ("nowhere",), 0.1), *BLOCKS]):
        with pytest.raises(ValueError, match="Blocks must have every parameter once; got"):
            plan(1e8, blocks=blocks)


def test_methods_of_the_advice():
    """Those that it was asked for are not left out in silence, and it is of the same model."""
    facts = advice(1e6)
    refused(lambda: make_plan(facts, PARAMS), "methods must", "topk", "powersgd", "methods={}")
    assert set(make_plan(facts, PARAMS, methods={}).exchanges) <= set(jc.planner.candidates())
    assert "topk" in make_plan(facts, PARAMS, methods=METHODS).exchanges
    refused(lambda: make_plan(facts, {"fc": PARAMS["fc"]}, methods={}), "that of params", "120,400", "124,410")
    frozen = PARAMS | {"steps": jnp.zeros(3, jnp.int32)}
    asked = estimate(frozen, K, 1e6, latency=1e-4, compute=0.1)
    refused(lambda: make_plan(asked, {"fc": PARAMS["fc"]}), "that of params")
