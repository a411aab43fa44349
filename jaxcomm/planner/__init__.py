"""The costs of links and devices, the resulting step time of each method, and which method to use."""

from jaxcomm.planner.advice import Advice, Prediction, advise, candidates, estimate
from jaxcomm.planner.costs import COPY_BYTES
from jaxcomm.planner.late_plan import LateLayer, LatePlan, plan_late_multiply
from jaxcomm.planner.links import Link, Links, given_links, measure_links

__all__ = [
    "COPY_BYTES",
    "Advice",
    "LateLayer",
    "LatePlan",
    "Link",
    "Links",
    "Prediction",
    "advise",
    "candidates",
    "estimate",
    "given_links",
    "measure_links",
    "plan_late_multiply",
]
