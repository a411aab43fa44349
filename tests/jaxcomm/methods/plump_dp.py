"""Plump-DP: the dense mean, without anything compressed."""

from typing import Any

import jaxcomm as jc
from tests.jaxcomm.methods.case import Case
from tests.reference.plump_dp import PlumpDpReference


class PlumpDp(Case):
    factory = staticmethod(jc.plump_dp)
    compresses = False
    residual = False

    def reference(self, tree: str, K: int) -> Any:
        return PlumpDpReference()


CASES = [PlumpDp.row()]
