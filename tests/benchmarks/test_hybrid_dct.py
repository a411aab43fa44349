"""The hybrid step: the use of network and processors, and what is refused."""

import pytest

from benchmarks import hybrid_dct
from benchmarks.hybrid_dct import Config, Record, check, uses


def test_uses_are_of_what_the_link_and_the_cores_could_do(monkeypatch):
    """In 200 ms, 10 Mbit/s carry 250,000 bytes, and two cores have 0.4 s."""
    monkeypatch.setattr(hybrid_dct, "_cores", lambda: 2)
    record = Record("dense", 2, 2, "10mbit", 200.0, 190.0, 210.0, 225_000.0, 220_000.0, 0.1)
    assert uses(record) == {"network_%": pytest.approx(90.0), "cpu_%": pytest.approx(25.0)}
    record.bytes_kernel = None
    assert uses(record)["network_%"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 1}, "--workers must be at least 2"),
        ({"stages": 4}, "--stages must be 2 or 3; got 2, 2048 and 4"),
        ({"batch": 7}, "divide --batch evenly"),
        ({"rate": "1gbit,10gbit"}, "--rate must be one rate"),
        ({"sparsity": 1.0}, "sparsity"),
    ],
)
def test_bad_values_are_refused_before_a_host_starts(options, said):
    with pytest.raises(ValueError, match=said):
        check(Config(**options))
