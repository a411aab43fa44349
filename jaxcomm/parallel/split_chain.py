"""An Optax chain in parts: what comes before its exchange, and what comes after."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm.collectives.axis import AxisName
from jaxcomm.parallel.chain import CLIPS, chain_links, made_by
from jaxcomm.parallel.state import in_axes_of_workers
from jaxcomm.types import communication_period, exchange_metrics

# What looks at many numbers at once makes something else of a slice than of a tensor.
_NOT_OF_A_SLICE = (CLIPS - {"clip"}) | {
    "centralize",
    "normalize",
    "normalize_by_update_norm",
    "scale_by_param_block_norm",
    "scale_by_param_block_rms",
    "scale_by_trust_ratio",
}


class SplitChain(NamedTuple):
    """The parts of an Optax chain.

    Attributes:
      before: what comes before the exchange.
      exchange: the same, and the exchange.
      after: what comes after it.
    """

    before: optax.GradientTransformation
    exchange: optax.GradientTransformation
    after: optax.GradientTransformation


def split_chain(
    tx: optax.GradientTransformation, params: Any, sizes: tuple[int, ...], axis_name: AxisName
) -> SplitChain:
    """Parts an Optax chain at its exchange.

    Args:
      tx: one exchange of gradients, or an `optax.chain` with one among its links.
      params: the parameters, or their shapes.
      sizes: the number of workers along each axis.
      axis_name: the axis of workers, or the axes along which they lie.

    Raises:
      ValueError: if none or several of the links are exchanges, or one is local or in `already_mean`.
    """
    if any("already_mean" in link.within for link in chain_links(tx, (), {})):
        raise ValueError(
            "PartitionSpecs say which gradients are whole, got already_mean in a chain for parameters in slices: take "
            "the exchange without it."
        )
    links = _chained(tx)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params)
    states = [jax.eval_shape(in_axes_of_workers(link.init, sizes, axis_name), shapes) for link in links]
    found = [place for place, state in enumerate(states) if exchange_metrics(state) is not None]
    if len(found) != 1:
        raise ValueError(
            f"One link of the chain exchanges gradients, got {len(found)} that do: write optax.chain(jaxcomm.dct_dp("
            "0.99), optax.adamw(3e-4)), with the exchange itself as a link, not inside another transformation."
        )
    (place,) = found
    if communication_period(states[place]) is not None:
        raise ValueError(
            "Workers that hold slices of one model have no parameters of their own, got a local method: use an "
            "exchange of gradients, such as jaxcomm.dct_dp(0.99), before the optimizer."
        )
    parts = (links[:place], links[: place + 1], links[place + 1 :])
    return SplitChain(*(optax.chain(*part) if part else optax.identity() for part in parts))


def check_works_on_slices(chain: SplitChain) -> None:
    """Refuses what looks at whole tensors, up to the exchange, where there are slices of them.

    Raises:
      ValueError: for a clip by a norm, a link of its own or inside of the exchange (dgc, iwp).
    """
    for link in chain_links(chain.exchange, (), {}):
        clips = [value for value in link.args.values() if getattr(value, "clip", None) is not None]
        if link.is_in(_NOT_OF_A_SLICE) or clips:
            raise ValueError(
                f"Up to the exchange a chain works on slices, number by number, got {link.name}"
                f"{' with clip=' + str(clips[0].clip) if clips else ''}, which looks at whole tensors: clip after the "
                "exchange, where a chain sees them (see check_chain)."
            )


def check_passes_by(exchange: optax.GradientTransformation) -> None:
    """Refuses an exchange that does more than to average, where some gradients are whole and pass it by.

    Raises:
      ValueError: for dgc and iwp with momentum.
    """
    for link in chain_links(exchange, (), {}):
        if link.momentum > 0:
            raise ValueError(
                f"Parameters whose gradients are whole pass the exchange by, got {link.name} with "
                f"momentum={link.momentum}: they would have none of it; use momentum=0 and optax.sgd(momentum=) after "
                "it."
            )


def _chained(tx: Any) -> list[optax.GradientTransformation]:
    """Returns the links of nested chains in order; Optax keeps them in the closures of two functions."""
    package, name, args = made_by(tx.update)
    _, _, init_args = made_by(tx.init)
    if package == "optax" and name == "chain" and len(args.get("update_fns", ())) == len(init_args.get("init_fns", ())):
        pairs = zip(init_args["init_fns"], args["update_fns"], strict=True)
        return [link for pair in pairs for link in _chained(optax.GradientTransformationExtraArgs(*pair))]
    if package == "optax" and name == "named_chain" and "transforms" in args:
        return [link for _, one in args["transforms"] for link in _chained(one)]
    return [tx]
