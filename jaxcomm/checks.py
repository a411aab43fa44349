"""Checks of arguments, with one form of error: the rule, the value, the remedy."""

from numbers import Integral, Real


def check_range(name: str, value: object, rule: str, holds: bool, remedy: str) -> None:
    """Raises a ValueError with the rule, the value and the remedy unless the rule holds.

    Args:
      name: of the argument.
      value: the argument.
      rule: what follows "must be".
      holds: whether the rule holds.
      remedy: a sentence of its own, as it is to be read: it begins with a capital letter, or with a value or the name
        of an argument as it is written in code, and has no full stop at the end.
    """
    if not holds:
        raise ValueError(f"{name} must be {rule}; got {value!r}. {remedy}.")


def check_transformation(name: str, tx: object) -> None:
    """Refuses what is no Optax transformation: an argument in its place, or a factory that was not called."""
    is_one = callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
    got = getattr(tx, "__name__", type(tx).__name__)
    remedy = f"Call it: {got}(...)" if callable(tx) else "Pass jaxcomm.chain(jaxcomm.topk(0.99), optax.adam(1e-3)), say"
    if not is_one:
        raise ValueError(f"{name} must be a transformation, with init and update; got {got}. {remedy}.")


def check_sparsity(sparsity: float) -> None:
    """Checks the fraction of coordinates that is not sent."""
    check_range(
        "sparsity",
        sparsity,
        "at least 0 and below 1 (the fraction of coordinates that is not sent)",
        isinstance(sparsity, Real) and 0 <= sparsity < 1,
        "Use 0.99 to send 1%, or plump_dp to send everything",
    )


def check_count(name: str, value: int, least: int, remedy: str) -> None:
    """Checks an integer that has a least value; see `check_range` for the remedy."""
    is_count = isinstance(value, Integral) and not isinstance(value, bool) and value >= least
    check_range(name, value, f"an integer of at least {least}", is_count, remedy)
