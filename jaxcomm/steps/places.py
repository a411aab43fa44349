"""Where the rows of a batch stand in the arrays of a traced program: each at its own place, or mixed with others.

A worker's row i is another of all rows, so what depends on i, or on a row beside it, is not as on one device. Arrays of
rows are those whose shapes differ in a second trace, see `jaxcomm.steps.reductions`. Along an axis of rows there may be
several arrays of all rows, one behind another (`stacks`), as after `jnp.concatenate`; and a reshape may cut the rows
into `blocks`, of which each worker has its own.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxcomm.steps.scaling import Integers, Scaling
from jaxcomm.types import PyTree

READ = 1 << 16  # elements of a constant that is read

# Primitives with indices, and what says which axes of the first operand they are of.
_SCATTERS = ("scatter", "scatter-mul", "scatter-max", "scatter-min", "scatter-add")
INDEXED = {"gather": "start_index_map", **dict.fromkeys(_SCATTERS, "scatter_dims_to_operand_dims")}

# Primitives that can make what is no row differ along rows.
_VARIED = ("pad", "slice", "dynamic_slice", "dynamic_update_slice", "scatter", "scatter-add", "cumsum", "cumprod")
# Primitives of which the output is read, if all their operands are.
_OF_INTEGERS = frozenset(
    (
        *("add", "and", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "div", "eq", "ge"),
        *("gt", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pcast", "pvary", "rem", "reshape"),
        *("rev", "select_n", "sign", "slice", "squeeze", "stop_gradient", "sub", "transpose"),
    )
)


def differs(one: PyTree, two: PyTree) -> bool:
    """Returns whether two traces of an array have other shapes, as one of rows has."""
    return one.aval.shape != two.aval.shape


def axes_of_rows(one: PyTree, two: PyTree) -> list[int]:
    """Returns the axes of an array that are of rows."""
    sizes = zip(one.aval.shape, two.aval.shape, strict=True)
    return [axis for axis, (size, second) in enumerate(sizes) if size != second]


def _integers(one: PyTree, operands: Sequence[Scaling], is_by_place: bool) -> Integers | None:
    """Returns the output of an equation, if it is integers that are computed from places of rows and constants."""
    is_read = (is_by_place or one.outvars[0].aval.size == 1) and one.primitive.name in _OF_INTEGERS
    if not is_read or not all(x.places is not None for x in operands):
        return None
    if one.primitive.name in ("pcast", "pvary"):
        return operands[0].places
    aval = one.outvars[0].aval
    if aval.size >= READ or not (jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == jnp.bool_):
        return None
    with jax.ensure_compile_time_eval():
        return Integers(np.asarray(one.primitive.bind(*(x.places.array for x in operands if x.places), **one.params)))


def is_part(one: PyTree, two: PyTree, blocks: int) -> bool:
    """Returns whether some of a worker's rows are taken from one place, as the first half; but not every second one."""
    array, params, name = one.invars[0].aval, one.params, one.primitive.name
    row_axes = axes_of_rows(one.invars[0], two.invars[0])
    if name in ("split", "unstack"):
        axis = params["axis"]
        return axis in row_axes or _is_of_blocks(array.shape, axis, row_axes, blocks)
    if name != "slice":
        return False
    strides, shape = params["strides"] or [1] * array.ndim, one.outvars[0].aval.shape
    parts = [axis for axis in range(array.ndim) if shape[axis] < array.shape[axis] and strides[axis] == 1]
    return any(axis in row_axes or _is_of_blocks(array.shape, axis, row_axes, blocks) for axis in parts)


def is_at_place(one: PyTree, two: PyTree, operands: Sequence[Scaling]) -> bool:
    """Returns whether some of a worker's rows are read or written at places, and not each at its own."""
    name = one.primitive.name
    if name not in INDEXED and name not in ("dynamic_slice", "dynamic_update_slice"):
        return False
    is_read, shape = name in ("gather", "dynamic_slice"), one.invars[0].aval.shape
    row_axes = axes_of_rows(one.invars[0], two.invars[0])
    part = (one.outvars[0] if is_read else one.invars[1]).aval.shape
    sizes = one.params.get("slice_sizes", part if len(part) == len(shape) else shape)
    is_indexed = name in INDEXED
    indexed = list(getattr(one.params["dimension_numbers"], INDEXED[name]) if is_indexed else range(len(shape)))
    cut = [axis for axis in indexed if sizes[axis] < shape[axis]]
    is_cut = is_read or not is_indexed
    if is_cut and any(_is_of_blocks(shape, axis, row_axes, operands[0].blocks) for axis in cut):
        return True
    if not is_indexed:
        is_known = not any(place.is_by_place for place in operands[1:])  # and not the counter of a loop over rows
        return is_known and not set(cut).isdisjoint(row_axes)
    places = [indexed.index(axis) for axis in row_axes if axis in (cut if is_read else indexed)]
    if not places:
        return False
    if operands[1].places is None:
        return not operands[1].is_by_place and not differs(one.invars[1], two.invars[1])
    numbers, rows = operands[1].places.array[..., places[0]], shape[indexed[places[0]]] // max(operands[0].stacks, 1)
    axes = [axis for axis in axes_of_rows(one.invars[1], two.invars[1]) if axis < numbers.ndim]
    if len(axes) != 1 or numbers.shape[axes[0]] % rows:
        return True
    own = np.repeat(np.arange(rows), numbers.shape[axes[0]] // rows)
    return bool(((np.moveaxis(numbers, axes[0], -1) - own) % rows).any())


def with_places(
    one: PyTree, two: PyTree, operands: Sequence[Scaling], outs: list[Scaling], producers: dict[Any, Any]
) -> list[Scaling]:
    """Returns the scalings of an equation's outputs with what is known of the places of rows in them."""
    name, out, second = one.primitive.name, one.outvars[0], two.outvars[0]
    pairs = list(zip(one.invars, two.invars, operands, strict=True))
    of_rows = [(var, number) for var, other, number in pairs if differs(var, other)]
    stacks, blocks = max((x.stacks for _, x in of_rows), default=0), max((x.blocks for x in operands), default=0)
    is_own, axes = any(x.is_own for x in operands), axes_of_rows(out, second)
    by_place = False
    if name == "concatenate" and one.params["dimension"] in axes:
        sizes = {var.aval.shape[one.params["dimension"]] / max(number.stacks, 1) for var, number in of_rows}
        is_stack = len(of_rows) == len(pairs) > 1 and len(sizes) == 1
        stacks = sum(max(number.stacks, 1) for _, number in of_rows) if is_stack else stacks
        by_place = not is_own and not is_stack
    elif name == "tile" and len(axes) == 1:
        stacks *= one.params["reps"][axes[0]]
    elif name == "iota":
        stacks = len(axes)
    elif name == "random_bits":
        blocks = 0
    elif name == "gather" and differs(one.invars[1], two.invars[1]):
        stacks = operands[1].stacks
    elif name == "reshape" and of_rows and len(axes) == len(in_axes := axes_of_rows(one.invars[0], two.invars[0])) == 1:
        before, after = (math.prod(x.aval.shape[: axis[0]]) for x, axis in ((one.invars[0], in_axes), (out, axes)))
        before = max(before * max(stacks, 1) // max(blocks, 1), 1)
        is_equal = operands[0].constant is not None or (after >= before and not stacks)
        stacks, blocks = (0, 0) if is_equal else (max(before // after, 1), after // before * (after > before))
    elif name in ("pad", "slice", "split") and is_own and len(axes) == 1 and one.invars[0].aval.ndim == out.aval.ndim:
        size, part = one.invars[0].aval.shape[axes[0]], out.aval.shape[axes[0]]
        stacks = part * stacks // size if part * stacks % size == 0 else stacks
    elif name in _VARIED:
        is_cut = not of_rows and name in ("slice", "dynamic_slice") and operands[0].constant is None
        is_varied = name not in ("slice", "dynamic_slice") and bool(_rows_changed(one, two))
        by_place = len(axes) > 0 and not is_own and (is_cut or is_varied)
    elif len({number.stacks for _, number in of_rows} - {0}) > 1:
        by_place = name != "gather" and (name != "dot_general" or not axes)
    if blocks and name not in ("reshape", "slice", "split", "unstack", "gather", "dynamic_slice"):
        by_place |= _mixes_blocks(one, two, blocks, operands, producers)
    by_place |= outs[0].is_by_place
    places = _integers(one, operands, by_place) if not is_own else None
    return [x._replace(is_by_place=by_place, stacks=stacks, blocks=blocks, places=places) for x in outs]


def _rows_changed(one: PyTree, two: PyTree) -> bool:
    """Returns whether a primitive makes numbers differ along rows."""
    name, axes = one.primitive.name, axes_of_rows(one.outvars[0], two.outvars[0])
    if name == "pad":
        return any(
            low or high or inner for axis, (low, high, inner) in enumerate(one.params["padding_config"]) if axis in axes
        )
    if name in ("cumsum", "cumprod"):
        return one.params["axis"] in axes
    if name == "dynamic_update_slice":
        shape, part = one.invars[0].aval.shape, one.invars[1].aval.shape
        return any(part[axis] < shape[axis] for axis in axes)
    return any(axis in axes for axis in getattr(one.params["dimension_numbers"], INDEXED[name]))


def _mixes_blocks(
    one: PyTree, two: PyTree, blocks: int, operands: Sequence[Scaling], producers: dict[Any, Any]
) -> bool:
    """Returns whether blocks of rows are joined, put in another order, or treated differently."""
    name, params = one.primitive.name, one.params
    for place, (var, other) in enumerate(zip(one.invars, two.invars, strict=True)):
        row_axes, shape = axes_of_rows(var, other), var.aval.shape
        axes = [axis for axis in range(len(shape)) if _is_of_blocks(shape, axis, row_axes or [len(shape)], blocks)]
        if not axes or not operands[place].blocks:
            continue
        if name == "transpose":
            order = params["permutation"]
            return any(order.index(axis) > order.index(row_axis) for axis in axes[:1] for row_axis in row_axes)
        if name == "dot_general":
            contract, batch = (dimensions[place] for dimensions in params["dimension_numbers"])
            is_other = not operands[1 - place].is_own and operands[1 - place].constant is None
            return (axes[0] in contract and (len(row_axes) > 0 or is_other)) or (axes[0] in batch and is_other)
        along = params.get("axes", params.get("dimensions", ()))
        along = (*along, *(params[key] for key in ("axis", "dimension") if isinstance(params.get(key), int)))
        if axes[0] in along:
            return len(row_axes) > 0 and not set(row_axes) & set(along)
        others = [(x, known) for x, known in zip(one.invars, operands, strict=True) if not known.is_own]
        if any(known.constant is None and _is_along(x, shape, axes[0], row_axes, producers) for x, known in others):
            return True
    return False


def _is_along(var: Any, shape: Sequence[int], axis: int, row_axes: Sequence[int], producers: dict[Any, Any]) -> bool:
    """Returns whether an array of a shape differs along an axis and not along rows, as far as its equation tells."""
    while not isinstance(var, Literal) and var in producers and producers[var].primitive.name in ("pcast", "pvary"):
        var = cast(Any, producers[var].invars[0])
    if isinstance(var, Literal):
        return False
    sizes: dict[int, int] = dict(enumerate(var.aval.shape))
    if len(sizes) != len(shape) or sizes[axis] != shape[axis]:
        return False
    if (eqn := producers.get(var)) is not None and eqn.primitive.name == "broadcast_in_dim":
        start: Any = eqn.invars[0].aval
        sizes = dict(zip(eqn.params["broadcast_dimensions"], start.shape, strict=True))
    return sizes.get(axis, 1) > 1 and all(sizes.get(row_axis, 1) == 1 for row_axis in row_axes)


def _is_of_blocks(shape: Sequence[int], axis: int, row_axes: Sequence[int], blocks: int) -> bool:
    """Returns whether an axis is the one of blocks of rows."""
    return blocks > 0 and shape[axis] == blocks and any(axis < row_axis for row_axis in row_axes)
