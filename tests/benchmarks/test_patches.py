"""The benchmark of patches: its counts by hand, from the bytes that are reported for a patch."""

import json

import pytest

from benchmarks.patches import Config, main


def test_steps_and_first_step(tmp_path, capsys):
    main(Config(n=20_000, steps="1,3", json=tmp_path / "patches.json"))
    first, third = json.loads((tmp_path / "patches.json").read_text())
    assert (first["step"], third["step"]) == (1, 3)
    # 1e-6 over the spacing of normal weights in bfloat16, averaged over their density: 4% (3.9% to 4.6% of 20,000).
    share = float(first["changed"].rstrip("%")) / 100
    assert 0.036 < share < 0.049
    assert first["plain"] == f"{2 / (6 * share):.1f}x"
    assert float(first["fewer"].rstrip("x")) == pytest.approx(40_000 / first["bytes"], abs=0.06)
    assert "20,000 weights" in capsys.readouterr().out
