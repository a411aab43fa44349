"""The hybrid step: the use of network and processors."""

import pytest

from benchmarks import hybrid_dct
from benchmarks.hybrid_dct import Record, uses


def test_uses_of_link_and_cores(monkeypatch):
    """In 200 ms, 10 Mbit/s carry 250,000 bytes, and two cores have 0.4 s."""
    monkeypatch.setattr(hybrid_dct, "_cores", lambda: 2)
    record = Record("dense", 2, 2, "10mbit", 200.0, 190.0, 210.0, 225_000.0, 220_000.0, 0.1)
    assert uses(record) == {"network_%": pytest.approx(90.0), "cpu_%": pytest.approx(25.0)}
    record.bytes_kernel = None
    assert uses(record)["network_%"] is None
