"""Stacked stage parameters: the trees of all stages in one list of arrays, and back."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jaxcomm.steps.pipeline.stage_params import plan_stacked

shapes = st.sampled_from([(), (0,), (1,), (3,), (6,), (2, 3), (3, 2), (2, 2, 2)])
tensors = st.tuples(shapes, st.sampled_from(["float32", "bfloat16", "int32"]))
stages = st.lists(st.dictionaries(st.sampled_from("abcde"), tensors, max_size=4), min_size=1, max_size=4)


def tree_of(spec, seed):
    """Numbers that are not zero, in a nested tree."""
    rng = np.random.default_rng(seed)
    tree = {name: np.asarray(rng.integers(1, 100, size=s), jnp.dtype(dtype)) for name, (s, dtype) in spec.items()}
    return {"inside": tree, "beside": [tree.pop("a")] if "a" in tree else ()}


def assert_same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


@hypothesis.settings(max_examples=12)
@hypothesis.given(specs=stages)
def test_unstack_inverts_stack(specs):
    trees = [tree_of(spec, seed) for seed, spec in enumerate(specs)]
    slots = plan_stacked(trees)

    @jax.jit
    def there_and_back(trees):
        slot_trees = [slots.to_slots(stage, tree) for stage, tree in enumerate(trees)]
        back = [slots.of_stage(stage, slot_tree) for stage, slot_tree in enumerate(slot_trees)]
        stack = slots.stack(trees)
        return stack, slots.unstack(stack), slot_trees, back

    stack, unstacked, slot_trees, back = there_and_back(trees)
    assert_same(unstacked, trees)
    assert_same(back, trees)
    for stage, slot_tree in enumerate(slot_trees):
        assert_same(slot_tree, [slot[stage] for slot in stack])
    expected = [((len(trees), *shape), dtype) for shape, dtype in zip(slots.shapes, slots.dtypes, strict=True)]
    assert [(slot.shape, slot.dtype) for slot in stack] == expected
    filled = sum(leaf.size for leaf in jax.tree.leaves(trees))
    assert filled == sum(np.count_nonzero(np.asarray(slot)) for slot in stack)


@hypothesis.settings(max_examples=12)
@hypothesis.given(specs=stages)
def test_padding_is_small(specs):
    """A type's i-th array is as large as the largest of the stages' i-th largest tensors; none could be smaller."""
    trees = [tree_of(spec, 0) for spec in specs]
    slots = plan_stacked(trees)
    room = dict.fromkeys(map(str, slots.dtypes), 0)
    for shape, dtype in zip(slots.shapes, slots.dtypes, strict=True):
        room[str(dtype)] += int(np.prod(shape))
    for dtype in room:
        sizes = [sorted((x.size for x in jax.tree.leaves(t) if str(x.dtype) == dtype), reverse=True) for t in trees]
        most = max(map(len, sizes))
        rows = [row + [0] * (most - len(row)) for row in sizes]
        assert room[dtype] == sum(map(max, zip(*rows, strict=True)))
    equal = plan_stacked([trees[0]] * 3)
    assert sum(map(np.prod, equal.shapes)) == sum(leaf.size for leaf in jax.tree.leaves(trees[0]))
    assert len(equal.shapes) == len(jax.tree.leaves(trees[0]))


def test_equal_shapes_stay():
    slots = plan_stacked(
        [
            {"b": jnp.ones(4), "w": jnp.ones((4, 3))},
            {"bias": jnp.ones(2), "kernel": jnp.ones((4, 3))},
        ]
    )
    assert slots.shapes == ((4, 3), (4,))
    assert slots.stages == ({"b": 1, "w": 0}, {"bias": 1, "kernel": 0})
    transposes = plan_stacked([jnp.ones((4, 3)), jnp.ones((3, 4))])  # equally large, but of another shape
    assert transposes.shapes == ((12,),)


def test_empty_slots():
    slots = plan_stacked([(), {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, {"w": jnp.ones(5)}])
    assert slots.shapes == ((6,), (3,))
    stack = slots.stack([(), {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, {"w": jnp.ones(5)}])
    np.testing.assert_array_equal(stack[0], [[0] * 6, [1] * 6, [1] * 5 + [0]])
    np.testing.assert_array_equal(stack[1], [[0] * 3, [1] * 3, [0] * 3])


def test_types_have_their_slots():
    slots = plan_stacked([{"a": jnp.ones(6, jnp.bfloat16)}, {"a": jnp.ones(6)}, {"a": jnp.ones(2, jnp.bfloat16)}])
    assert sorted(zip(map(str, slots.dtypes), slots.shapes, strict=True)) == [("bfloat16", (6,)), ("float32", (6,))]


def test_plans_of_shapes():
    trees = [{"w": jnp.arange(6.0).reshape(2, 3)}, {"w": jnp.arange(4.0)}]
    slots = plan_stacked(trees)
    assert plan_stacked(jax.eval_shape(lambda: trees)) == slots
    assert_same(jax.jit(lambda trees: slots.unstack(slots.stack(trees)))(trees), trees)


def test_gradients_through_slots():
    trees = [{"w": jnp.arange(6.0).reshape(2, 3)}, {"w": jnp.arange(4.0)}]
    slots = plan_stacked(trees)
    (gradient,) = jax.grad(lambda stack: jnp.sum(slots.of_stage(1, stack)["w"] ** 2))(
        [slot[1] for slot in slots.stack(trees)]
    )
    np.testing.assert_array_equal(gradient, [0, 2, 4, 6, 0, 0])
