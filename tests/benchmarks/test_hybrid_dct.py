"""The hybrid step: the use of network and processors."""

import pytest

from benchmarks import hybrid_dct
from benchmarks.hybrid_dct import uses


def test_uses_of_link_and_cores(monkeypatch):
    """In 200 ms, 10 Mbit/s carry 250,000 bytes, and two cores have 0.4 s."""
    monkeypatch.setattr(hybrid_dct, "_cores", lambda: 2)
    row = {"rate": "10mbit", "ms_median": 200.0, "bytes_kernel": 225_000.0, "cpu_seconds": 0.1}
    assert uses(row) == {"network_%": pytest.approx(90.0), "cpu_%": pytest.approx(25.0)}
    assert uses(row | {"bytes_kernel": None})["network_%"] is None
