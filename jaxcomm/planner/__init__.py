"""What links and devices cost, what each method then costs, and which to use."""

from jaxcomm.planner.advise import Advice, Prediction, advise, candidates, estimate
from jaxcomm.planner.alone import alone
from jaxcomm.planner.costs import COPY_BYTES
from jaxcomm.planner.links import Link, Links, given_links, measure_links

__all__ = [
    "COPY_BYTES",
    "Advice",
    "Link",
    "Links",
    "Prediction",
    "advise",
    "alone",
    "candidates",
    "estimate",
    "given_links",
    "measure_links",
]
