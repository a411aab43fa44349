"""Collectives and steps for GPUs, in the notations of several JAX: stored, and as this JAX compiles them."""

import importlib.util
from fractions import Fraction

import jax
import pytest

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from tests.jaxcomm.accounting.gpu_forms import FORMS, STEPS, K, make_step, stored, texts

VERSIONS = ["0.10.2", "0.11.1", "0.12.0.1"]
# Bytes that a worker receives by the algorithm of each operation, in sizes of what it puts in.
RECEIVED = {
    "all_reduce": Fraction(2 * (K - 1), K),
    "all_gather": Fraction(K - 1),
    "reduce_scatter": Fraction(K - 1, K),
    "all_to_all": Fraction(K - 1, K),
    "permute": Fraction(1),
}


def check_form(text, form):
    (traffic,) = read_program(text).always
    assert (traffic.op, traffic.operand_bytes, traffic.workers) == (form.op, form.operand_bytes, K)
    assert traffic.dtype == form.types
    assert traffic.received == RECEIVED[form.op] * form.operand_bytes


def verify(text, name):
    step, tx, params, arguments = make_step(STEPS[name], jc.make_mesh(data=K))
    report = jc.verify(step, *arguments, tx=tx, params=params, workers=K, text=text)
    assert report.received == step.report(*arguments).received


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("when", ["asynchronous", "alone"])
@pytest.mark.parametrize("name", FORMS)
def test_stored_collectives(name, when, version):
    check_form(stored(version)[f"{name}, {when}"], FORMS[name])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", STEPS)
def test_stored_steps(name, version):
    """On a CPU, where four workers send the same bytes."""
    verify(stored(version)[name], name)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_notations(version):
    """They are of what was double counted once: operands before results, from JAX 0.11.1 on."""
    text = stored(version)["sum f32, asynchronous"]
    assert ("((f32[1048576]{0}), f32[1048576]{0}) all-reduce-start(" in text) == (version != "0.10.2")
    assert any(" all-gather-start(" in text for text in stored(version).values())


def test_dense_bytes_of_a_step():
    """300 * 400 + 400 + 400 * 10 numbers, and the loss, summed among four workers."""
    program = read_program(stored("0.12.0.1")["step of plump_dp"])
    assert program.received == Fraction(2 * 3, 4) * 4 * (300 * 400 + 400 + 400 * 10 + 1)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the wheel jax-cuda12-plugin")
def test_compiled_by_this_jax(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    for name, text in texts():
        form = FORMS.get(name.partition(",")[0])
        if form:
            check_form(text, form)
        else:
            verify(text, name)
    assert jax.default_backend() == "cpu"
