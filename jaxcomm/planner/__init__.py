"""The costs of links and devices, the resulting step time of each method, and which method to use."""

from jaxcomm.assignment.problem import Device
from jaxcomm.planner.advice import Advice, Prediction, advise, candidates, estimate
from jaxcomm.planner.costs import COPY_BYTES
from jaxcomm.planner.links import Link, Links, given_links, measure_links
from jaxcomm.planner.plan import Plan, read_plan
from jaxcomm.planner.planning import ModelBlock, make_plan, place

__all__ = [
    "COPY_BYTES",
    "Advice",
    "Device",
    "Link",
    "Links",
    "ModelBlock",
    "Plan",
    "Prediction",
    "advise",
    "candidates",
    "estimate",
    "given_links",
    "make_plan",
    "measure_links",
    "place",
    "read_plan",
]
