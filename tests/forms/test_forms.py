"""Training scripts of several libraries, and their diffs that bring in jaxcomm: how long they are, how both train."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm as jc
from tests.forms import data

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs/guide.md"
K = 8
USUAL = ("flax_nnx", "class_weights", "counts", "equinox_batch_norm")
# Not shown in the guide.
NAMED = ("flax_rnn", "class_weights", "multi_transform", "counts", "gan", "equinox_batch_norm", "ensemble", "experts")
COMMUNICATING = ("contrastive", "equinox_batch_norm")  # losses whose own bytes exceed those of so small a model
# What `verify` takes from each script: the step, its arguments, and the parameters.
VERIFIED = {
    "flax_train_state": lambda s: (s["train_step"], (s["state"], s["batch"]), s["params"]),
    "flax_nnx": lambda s: (
        s["train_step"],
        (s["model"], s["optimizer"], s["metrics"], s["batch"]),
        s["nnx"].state(s["model"], s["nnx"].Param),
    ),
    "flax_nnx_split": lambda s: (
        s["train_step"],
        (s["graphdef"], s["state"], s["batch"]),
        s["nnx"].state(s["model"], s["nnx"].Param),
    ),
    "multi_steps": lambda s: (s["train_step"], (s["state"], s["batch"]), s["params"]),
    "equinox_filter_jit": lambda s: (
        s["train_step"],
        (s["model"], s["opt_state"], s["batch"], s["key"]),
        s["eqx"].filter(s["model"], s["eqx"].is_inexact_array),
    ),
    "haiku_jmp": lambda s: (s["train_step"], (s["state"], s["batch"]), s["params"]),
    "pmap": lambda s: (s["train_step"], (s["state"], s["batch"]), s["params"]),
    "shard_map": lambda s: (s["train_step"], (s["state"], s["batch"]), s["state"][0]),
    "scan": lambda s: (s["train_epoch"], (s["state"], s["epoch"]), s["params"]),
    "flax_rnn": lambda s: (s["train_step"], (s["state"], s["batch"]), s["params"]),
    "haiku_gru": lambda s: (s["train_step"], (s["state"], s["batch"]), s["params"]),
    "class_weights": lambda s: (s["step"], (s["state"], s["batch"]), s["params"]),
    "contrastive": lambda s: (
        s["train_step"],
        (s["model"], s["optimizer"], s["batch"]),
        s["nnx"].state(s["model"], s["nnx"].Param),
    ),
    "tied_lm": lambda s: (s["train_step"], (s["state"], s["batch"]), s["params"]),
    "multi_transform": lambda s: (s["train_step"], (s["state"], s["batch"]), s["params"]),
    "counts": lambda s: (s["train_step"], (s["state"], s["batch"], s["key"]), s["params"]),
    "policy_gradient": lambda s: (
        s["train_step"],
        (s["params"], s["opt_state"], s["environments"]),
        s["params"],
    ),
    "gan": lambda s: (s["train_step"], (s["state"], s["batch"]), (s["params"], s["critic_params"])),
    "ensemble": lambda s: (s["train_step"], (s["state"], s["batch"]), s["params"]),
    "experts": lambda s: (s["train_step"], (s["state"], s["batch"]), s["params"]),
    "equinox_batch_norm": lambda s: (
        s["train_step"],
        (s["model"], s["state"], s["opt_state"], s["batch"]),
        s["eqx"].filter(s["model"], s["eqx"].is_inexact_array),
    ),
}
# A script whose numbers are those of one device must not be told that they may differ.
pytestmark = pytest.mark.filterwarnings("error::UserWarning")
FORMS = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in VERIFIED]


def source(name):
    return (HERE / f"{name}.py").read_text()


def hunks(name):
    """The hunks of a script's diff, as lists of lines; the import of the library is not in it."""
    return [hunk.splitlines(keepends=True) for hunk in (HERE / f"{name}.diff").read_text().split("@@\n")[1:]]


def changed(name):
    """The script with jaxcomm."""
    text = source(name).replace("from tests.forms", "import jaxcomm as jc\nfrom tests.forms", 1)
    for hunk in hunks(name):
        old, new = ("".join(line[1:] for line in hunk if line[0] in signs) for signs in (" -", " +"))
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def run(text):
    scope = {"__name__": "script"}
    exec(compile(text, "script", "exec"), scope)
    return scope


def dense(text):
    program, count = re.subn(r"jc\.(?:topk\(0\.9|quant_dp\(8)(?:, )?(.*?)\)", r"jc.plump_dp(\1)", text)
    assert count == text.count("jc.chain(") >= 1
    return program


def changed_lines(name):
    """The number of lines that were added, changed or deleted, apart from the import of the library and empty lines."""
    runs = [list(run) for hunk in hunks(name) for _, run in itertools.groupby(hunk, lambda line: line[0] == " ")]
    return sum(max(sum(line[0] == sign and line[1:].strip() != "" for line in run) for sign in "-+") for run in runs)


@pytest.mark.parametrize("name", VERIFIED)
def test_at_most_three_lines_change(name):
    """But where `make_train_step` makes the step of a loss: the script's own goes, the calls change."""
    assert 2 <= changed_lines(name) <= (11 if name == "class_weights" else 3)


def test_a_diff_for_each_script():
    names = {path.stem for path in HERE.glob("*.py")} - {"data", "test_forms"}
    assert names == {path.stem for path in HERE.glob("*.diff")} == VERIFIED.keys()


@pytest.mark.parametrize("name", VERIFIED)
def test_the_guide_shows_the_diff(name):
    diff = "".join(line for hunk in hunks(name) for line in hunk if line[0] in "-+" and line[1:].strip())
    expected = f"`{name}`" if name in NAMED else f"```diff\n{diff}```"
    assert expected in GUIDE.read_text()


@pytest.mark.parametrize("name", FORMS)
def test_dense_is_one_device(name, monkeypatch):
    """With batch normalisation all workers get the same rows; with dropout nothing is dropped; loss scales meet NaN."""
    if name == "flax_nnx":
        monkeypatch.setattr(data, "COPIES", K)
    if name == "haiku_jmp":
        monkeypatch.setattr(data, "POISONED", 12)
    before, after = (
        re.sub(r"Dropout\(0\.1\)|DROPOUT = 0\.1", lambda m: m[0].replace("0.1", "0.0"), text)
        for text in (source(name), changed(name))
    )
    reference, result = run(before), run(dense(after))
    assert len(reference["losses"]) == data.STEPS
    np.testing.assert_allclose(result["losses"], reference["losses"], rtol=1e-4, atol=1e-5)
    if "others" in reference:
        np.testing.assert_allclose(result["others"], reference["others"], rtol=1e-4)
    if name == "haiku_jmp":
        assert np.isnan(reference["losses"][12])
        assert result["state"].loss_scale.loss_scale == reference["state"].loss_scale.loss_scale != 2**18
    assert reference["losses"][-1] < 0.6 * reference["losses"][0]


@pytest.mark.parametrize("name", FORMS)
def test_compressed_learns(name):
    script = run(changed(name))
    losses = np.asarray(script["losses"])
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    step, args, params = VERIFIED[name](script)
    steps = data.STEPS if name == "scan" else 1
    tx = script["generator_tx" if name == "gan" else "tx"]
    if name != "ensemble":  # which has an exchange for each member
        report = jc.verify(step, *args, tx=tx, params=params, workers=K, steps=steps, other_bytes=1024)
    if name in (*COMMUNICATING, "ensemble"):
        report = jc.wire_report(tx, params, K)
    assert report.ratio_to_dense * steps > 1.5
    # Each worker has its own residual, and a row that knows its worker.
    states = [leaf for leaf in jax.tree.leaves(args, is_leaf=_is_rows) if _is_rows(leaf)]
    rows = [np.asarray(jax.tree.leaves(leaf)[0]).reshape(K, -1) for leaf in states]
    workers = [row for row in rows if row.shape[1] == 1 and row.dtype == jnp.int32]
    if name not in ("flax_nnx_split", "tied_lm", "ensemble"):  # states without types, without rows, of members
        assert any((row[:, 0] == np.arange(K) + (K << 16)).all() for row in workers)
        assert any(len({row.tobytes() for row in leaf}) == K for leaf in rows)


def _is_rows(node):
    return isinstance(node, jc.PerWorker)
