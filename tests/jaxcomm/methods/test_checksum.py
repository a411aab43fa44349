"""A checksum in every payload: its receiver finds a flipped bit, and the step is skipped on all workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxcomm as jc
from tests.jaxcomm.cases import CASES, first_rows
from tests.jaxcomm.methods.families import Coded, Shared, Sparse
from tests.jaxcomm.trees import gradients, params_of, shapes_of, zeros_of
from tests.jaxcomm.workers import is_per_worker, state_of_workers

K, VICTIM, TREE = 3, 1, "half"
NOWHERE = np.array([-1, 0, 0, VICTIM])


class Flipped:
    """K workers, one of which receives one message with a flipped bit; every step says which."""

    def __init__(self, tx, monkeypatch):
        self.messages, self.where = 0, None
        for name in ("all_gather", "all_to_all", "ppermute"):
            monkeypatch.setattr(lax, name, self.flipping(getattr(lax, name)))
        self.first, axes = state_of_workers(tx, TREE, K)
        params = params_of(TREE)

        def update(row, state, where):
            self.where = where
            return tx.update(row, state, params)

        workers = jax.vmap(update, in_axes=(0, axes, None), axis_name="data")
        example = (gradients("normal", 0, TREE, K), self.first, NOWHERE)
        self.update = jax.jit(workers).lower(*example).compile()

    def flipping(self, collective):
        def flip(words, axis_name, *args, **options):
            message = collective(words, axis_name, *args, **options)
            if message.dtype != jnp.uint32 or message.ndim == 0:
                return message
            number, word, bit, victim = self.where
            is_hit = (number == self.messages) & (lax.axis_index(axis_name) == victim)
            self.messages += 1
            rows = message.reshape(-1, message.shape[-1])  # a message each, the last from another worker
            flipped = rows.at[-1, word % rows.shape[1]].set(
                rows[-1, word % rows.shape[1]] ^ (1 << bit).astype("uint32")
            )
            return jnp.where(is_hit, flipped, rows).reshape(message.shape)

        return flip

    def step(self, seed, state, where=NOWHERE):
        """(every worker's means, the state, whether each worker skipped)"""
        means, new = self.update(gradients("normal", seed, TREE, K), state, np.asarray(where))
        skipped = np.asarray(jc.exchange_metrics(new).skipped).tolist()
        one = jax.tree.map(
            lambda node: node if is_per_worker(node) else jax.tree.map(lambda leaf: leaf[0], node),
            new,
            is_leaf=is_per_worker,
        )
        return means, one, skipped


def kept(state):
    memory = state.memory._replace(due=None) if hasattr(state.memory, "due") else state.memory
    return state.residual, memory


CHECKED = [type(case)({**case.options, "checksum": True}, case.setting) for case in CASES if not case.sums_numbers]


def kind_of_messages(case):
    """What decides who seals and reads payloads: the family and the collective; and whether momentum must stay."""
    family = next((kind for kind in (Sparse, Shared, Coded) if isinstance(case, kind)), None)
    return family, case.options.get("collective"), case.momentum


# The first of each kind.
KINDS = list({kind_of_messages(case): case for case in reversed(CHECKED)}.values())[::-1]


@pytest.mark.parametrize("case", first_rows(KINDS))
def test_a_flip_skips_on_all(case, monkeypatch):
    """In any message: all means are zero, residuals stay. If the bit is not sent, the step is unchanged."""
    workers, rng, kinds = Flipped(case.make(), monkeypatch), np.random.default_rng(0), set()
    state = workers.first
    for seed in range(4):
        means, after, skipped = workers.step(seed, state)
        assert skipped == [0] * K
        for number in range(workers.messages):
            hit = [number, rng.integers(2**20), rng.integers(32), seed % 2]  # the first worker and the second
            outcome, expected, skipped = workers.step(seed, state, hit)
            if skipped == [1] * K:
                kinds.add(number)
                assert not any(mean.any() for mean in outcome.values())
                jax.tree.map(np.testing.assert_array_equal, kept(expected), kept(state))
            else:
                assert skipped == [0] * K
                jax.tree.map(np.testing.assert_array_equal, (outcome, expected), (means, after))
        state = after
    assert kinds == set(range(workers.messages)) != set()


def test_without_a_checksum(monkeypatch):
    workers = Flipped(jc.topk(0.9, value_dtype="float32", collective="gather"), monkeypatch)
    clean, _, _ = workers.step(0, workers.first)
    means, _, skipped = workers.step(0, workers.first, [0, -1, 3, VICTIM])  # the last value
    assert skipped == [0] * K
    for worker in range(K):
        is_same = all(np.array_equal(means[name][worker], clean[name][worker]) for name in means)
        assert is_same == (worker != VICTIM)


@pytest.mark.parametrize("case", first_rows(CHECKED))
def test_cost(case):
    report = jc.wire_report(case.make(), shapes_of(TREE), 8)
    assert (report.program.received, report.program.received_at_most) == case.received_bytes(TREE, 8)


@pytest.mark.parametrize("case", [case for case in CASES if case.sums_numbers], ids=str)
def test_sums_have_none(case):
    with pytest.raises(
        ValueError, match=f"checksum must be False for {case.name} with a collective .* Pass .*(bfloat16|two_shot)"
    ):
        case.make(checksum=True)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (jc.powersgd, "Take a method that sends payloads, as topk and sign do"),
        (jc.slim_dp, "Take a method that sends payloads"),
        (lambda **options: jc.local_sgd(2, exchange=jc.topk(), **options), "Pass it to exchange="),
        (lambda **options: jc.hierarchical(jc.topk(axis_name="slice"), **options), "Pass it to exchange="),
    ],
)
def test_remedies(make, remedy):
    with pytest.raises(ValueError, match=f"checksum must be False for .* got True. {remedy}"):
        make(checksum=True)


def test_models_in_16_bits():
    tx = optax.chain(optax.sgd(0.1), jc.plump_dp(p=2, value_dtype="bfloat16", checksum=True))
    assert tx.init(zeros_of(TREE))[1].memory.exchange.method.checksum
