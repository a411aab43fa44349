"""Checkpoints without runs: what is written in the background, and what a smaller or larger mesh reads."""

import logging
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from tests.jaxcomm.train_steps import init_state
from train.checkpoints import Checkpoints, SettingsError

ABOUT = {"workers": 4, "learning_rate": 0.1}


def make_state(workers, size=3000, seed=0):
    """A state of two tensors on a mesh, with random numbers in every row of the residual and the thresholds."""
    mesh = jc.make_mesh(data=workers)
    params = {"kernel": jnp.ones((size,)), "bias": jnp.zeros((5,))}
    tx = optax.chain(jc.dct_dp(0.9, life_span=7), optax.trace(0.9), optax.scale_by_learning_rate(0.1))
    state = init_state(params, tx, mesh)
    rng = np.random.default_rng(seed)

    def fill(leaf):
        if leaf.dtype != jnp.float32:
            return leaf
        return jax.device_put(rng.standard_normal(leaf.shape, np.float32), leaf.sharding)

    return mesh, jax.tree.map(fill, state)


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    yield checkpoints
    checkpoints.close()


def test_donation(checkpoints):
    """Saving goes on in the background, while the next steps overwrite the memory of the state."""
    _, state = make_state(4, size=2**20)
    fresh = make_state(4, size=2**20, seed=1)[1]

    def change(leaf):
        return ~leaf if leaf.dtype == bool else leaf + 1

    step = jax.jit(lambda state: jax.tree.map(change, state), donate_argnums=0)
    for number in range(1, 4):
        expected = jax.tree.map(np.array, state)
        checkpoints.save(number, state, {"step": number}, ABOUT)
        for _ in range(3):
            state = step(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        restored = checkpoints.restore(number, fresh, jc.resize_workers, ABOUT)
        assert (restored.data, restored.message) == ({"step": number}, "")
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, restored.state, expected)))


def test_the_two_newest(checkpoints):
    _, state = make_state(4)
    assert checkpoints.last() is None
    for number in (2, 5, 9):
        checkpoints.save(number, state, {"step": number}, ABOUT)
    checkpoints.save(9, state, {"step": 9, "again": True}, ABOUT)
    checkpoints.wait()
    assert checkpoints.last() == 9
    assert sorted(int(path.name) for path in checkpoints.folder.iterdir()) == [5, 9]
    assert checkpoints.restore(9, make_state(4)[1], jc.resize_workers, ABOUT).data == {"step": 9}


def test_what_a_killed_save_leaves_is_removed(tmp_path):
    """A process killed while it saves leaves a folder of a name like this, as large as a checkpoint."""
    _, state = make_state(4)
    with Checkpoints(tmp_path) as first:
        first.save(2, state, {"step": 2}, ABOUT)
        first.wait()
    first.close()
    (left := tmp_path / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (left / "d").write_bytes(b"half a checkpoint")
    with Checkpoints(tmp_path) as second:
        assert second.last() == 2
        second.save(4, state, {"step": 4}, ABOUT)
        second.wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]
        assert second.restore(4, state, jc.resize_workers, ABOUT).data == {"step": 4}
    second.close()


@pytest.mark.parametrize("workers", [1, 2, 3, 6, 8])
def test_another_number_of_workers(workers, checkpoints):
    _, state = make_state(4)
    checkpoints.save(3, state, {"step": 3}, ABOUT)
    checkpoints.wait()
    _, like = make_state(workers, seed=1)
    restored = checkpoints.restore(3, like, jc.resize_workers, ABOUT | {"workers": workers})
    exchange, before = restored.state.opt_state[0], state.opt_state[0]
    assert exchange.residual.rows.shape == (workers, before.residual.rows.shape[1])
    for name in ("residual", "threshold"):
        holders = (exchange, before) if name == "residual" else (exchange.memory, before.memory)
        new, old = (np.asarray(getattr(holder, name).rows) for holder in holders)
        np.testing.assert_allclose(new.mean(axis=0), old.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert bool(exchange.memory.due)
    assert f"4 workers and the run {workers}" in restored.message
    for leaf, expected in zip(jax.tree.leaves(restored.state), jax.tree.leaves(like), strict=True):
        assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
        assert leaf.dtype == expected.dtype
    assert np.array_equal(restored.state.params["kernel"], state.params["kernel"])


def test_other_settings(checkpoints):
    _, state = make_state(4)
    checkpoints.save(3, state, {"step": 3}, ABOUT)
    checkpoints.wait()
    with pytest.raises(
        ValueError, match=r"learning_rate 0\.1 \(now 0\.2\), seed None \(now 1\). Give the same settings"
    ):
        checkpoints.restore(3, state, jc.resize_workers, ABOUT | {"learning_rate": 0.2, "seed": 1})


def flip(array, checkpoints, step, tmp_path):
    """Saves a checkpoint again, with one bit of one array flipped and the old checksums."""
    import orbax.checkpoint as ocp

    path = checkpoints.folder / str(step) / "state"
    with ocp.PyTreeCheckpointer() as files:
        state = files.restore(path)
        name = next(name for name in sorted(state) if array in name)
        values = np.array(state[name])
        words = values.reshape(-1).view(np.uint8)
        words[words.size // 2] ^= 4
        state[name] = values
        files.save(path, state, force=True)


@pytest.fixture
def two(checkpoints):
    """Checkpoints of the steps 5 and 9, the list of messages, and a function that reads the newest."""
    _, state = make_state(4)
    for number in (5, 9):
        checkpoints.save(
            number,
            jax.tree.map(lambda leaf, n=number: leaf if leaf.dtype == bool else leaf + n, state),
            {"step": number},
            ABOUT,
        )
    checkpoints.wait()
    messages = []

    def newest(about=ABOUT):
        return checkpoints.newest(make_state(4, seed=1)[1], jc.resize_workers, about, messages.append)

    return newest, messages


def test_the_newest(two):
    newest, messages = two
    assert (newest().step, messages) == (9, [])


@pytest.mark.parametrize("array", ["kernel", "residual", "threshold", "metrics"])
def test_a_flipped_bit(array, two, checkpoints, tmp_path):
    newest, messages = two
    flip(array, checkpoints, 9, tmp_path)
    assert newest().step == 5
    (line,) = messages
    assert line.startswith("the checkpoint of step 9 is passed over, ValueError: ")
    assert array in line
    assert line.endswith("their checksums differ")
    # It is out of the way: step 9 can be written again.
    assert (checkpoints.folder.parent / "damaged-9").is_dir()
    _, state = make_state(4)
    checkpoints.save(9, state, {"step": 9}, ABOUT)
    checkpoints.wait()
    assert newest().step == 9


def remove_largest(folder):
    max(
        (path for path in (folder / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    ).unlink()


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def flip_setting(folder):
    """Flips the lowest bit of a digit: the learning rate 0.1 becomes 0.0."""
    path = folder / "about" / "metadata"
    path.write_text(path.read_text().replace("0.1", "0.0"))


DAMAGES = {
    "a setting with another bit": flip_setting,
    "the largest file is gone": remove_largest,
    "the index is gone": lambda folder: shutil.rmtree(folder / "state" / "d"),
    "no state": lambda folder: shutil.rmtree(folder / "state"),
    "no settings": lambda folder: shutil.rmtree(folder / "about"),
    "settings of nothing": lambda folder: (folder / "about" / "metadata").write_text("{}"),
    "a position that is none": lambda folder: (folder / "data" / "metadata").write_text("}"),
    "the position of another step": lambda folder: (folder / "data" / "metadata").write_text('{"step": 5}'),
    "an empty folder": empty,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage(damage, two, checkpoints):
    newest, messages = two
    DAMAGES[damage](checkpoints.folder / "9")
    restored = newest()
    assert (restored.step, restored.data) == (5, {"step": 5})
    assert len(messages) == 1
    assert messages[0].startswith("the checkpoint of step 9 is passed over, ")


def test_all_are_damaged(two, checkpoints):
    newest, messages = two
    for step in ("5", "9"):
        empty(checkpoints.folder / step)
    with pytest.raises(ValueError, match=r"got none in .* of steps 9, 5. Copy them again, or begin anew"):
        newest()
    assert len(messages) == 2
    assert not list(checkpoints.folder.parent.glob("damaged*"))


def test_other_settings_are_no_damage(two, checkpoints):
    newest, messages = two
    with pytest.raises(SettingsError, match=r"learning_rate 0\.1 \(now 0\.2\)"):
        newest(ABOUT | {"learning_rate": 0.2})
    assert messages == []


def test_longer_but_not_shorter(checkpoints):
    _, state = make_state(4)
    checkpoints.save(3, state, {"step": 3}, ABOUT | {"steps": 10})
    checkpoints.wait()
    assert checkpoints.restore(3, state, jc.resize_workers, ABOUT | {"steps": 10}).message == ""
    longer = checkpoints.restore(3, state, jc.resize_workers, ABOUT | {"steps": 25})
    assert longer.message == "The run of 10 steps is now one of 25, and so is its schedule."
    with pytest.raises(SettingsError, match=r"steps 10 \(now 8\)"):
        checkpoints.restore(3, state, jc.resize_workers, ABOUT | {"steps": 8})


def test_an_empty_folder(checkpoints):
    _, state = make_state(4)
    assert checkpoints.newest(state, jc.resize_workers, ABOUT, print) is None


def test_stacks_of_threads(tmp_path, monkeypatch, caplog):
    """After a failed read or write, TensorStore's threads call a closed event loop, once for every array.

    They also log what is raised, some only when the process ends: lines that would hide the one that counts.
    """
    messages = []
    logging.getLogger("asyncio").setLevel(logging.NOTSET)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: messages.append(str(unraisable.exc_value)))

    class Failing:
        def __init__(self, message):
            self.message = message

        def __del__(self):
            raise RuntimeError(self.message)

    checkpoints = Checkpoints(tmp_path)
    Failing("Event loop is closed")
    with checkpoints:
        for message in ("Event loop is closed", "another"):
            Failing(message)
    Failing("Event loop is closed")
    assert messages == ["another", "Event loop is closed"]
    logging.getLogger("asyncio").error("Future exception was never retrieved")
    assert caplog.records == []
