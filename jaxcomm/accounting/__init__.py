"""Bytes: predicted from a traced program, counted in a compiled one, and proof that the two agree."""

from jaxcomm.accounting.late_plan import LateLayer, LatePlan, plan_late_multiply
from jaxcomm.accounting.report import PipelineReport, WireReport, step_report, verify, wire_report
from jaxcomm.traffic import Traffic

__all__ = [
    "LateLayer",
    "LatePlan",
    "PipelineReport",
    "Traffic",
    "WireReport",
    "plan_late_multiply",
    "step_report",
    "verify",
    "wire_report",
]
