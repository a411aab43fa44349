"""Which exchange for which tensor, and which stage for which block: a mixed integer program, and its plans."""

from jaxcomm.placement.plan import Plan, read_plan
from jaxcomm.placement.planning import ModelBlock, make_plan, place
from jaxcomm.placement.problem import Device

__all__ = ["Device", "ModelBlock", "Plan", "make_plan", "place", "read_plan"]
