"""From a method's fields to its transformation."""

import dataclasses

import optax

import jaxcomm as jc
from configs.experiment import DctDp, Method, PlumpDp, TopK

_FACTORIES = {PlumpDp: jc.plump_dp, TopK: jc.topk, DctDp: jc.dct_dp}
_NAMES = {PlumpDp: "plump_dp", TopK: "topk", DctDp: "dct_dp"}


def method_name(method: Method) -> str:
    """Returns the name that tables and folders use, which is the name of the transformation."""
    return _NAMES[type(method)]


def make_exchange(method: Method) -> optax.GradientTransformation:
    """Makes a method's transformation; its fields are the arguments."""
    return _FACTORIES[type(method)](**dataclasses.asdict(method))
