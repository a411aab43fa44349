"""Layers that know that there are several workers."""

from jaxcomm.layers.boundary import Boundary, dct_mp, masked_boundary
from jaxcomm.layers.late_multiply import late_multiply
from jaxcomm.layers.plan import LateLayer, LatePlan, plan_late_multiply

__all__ = ["Boundary", "LateLayer", "LatePlan", "dct_mp", "late_multiply", "masked_boundary", "plan_late_multiply"]
