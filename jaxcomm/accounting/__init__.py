"""Bytes: predicted from a traced program, counted in a compiled one, and proof that the two agree."""

from jaxcomm.accounting.report import PipelineReport, WireReport, step_report, verify, wire_report
from jaxcomm.traffic import Traffic

__all__ = [
    "PipelineReport",
    "Traffic",
    "WireReport",
    "step_report",
    "verify",
    "wire_report",
]
