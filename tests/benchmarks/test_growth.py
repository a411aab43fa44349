"""How the cost of an exchange grows: a small run on hosts, and the laws by hand."""

import json

import pytest

from benchmarks import growth
from benchmarks.growth import Config


def row(parameters, ms, hosts=2, sweep="parameters", method="topk", **options):
    times = {"ms_median": ms, "bytes_kernel": 1.1e5, "bytes_predicted": 1e5, "compile_s": 2.0}
    fields = {"sweep": sweep, "method": method, "parameters": parameters, "hosts": hosts, "density": 0.01}
    return fields | times | {"rate": "100mbit", "held_bytes": 40 * parameters} | options


def test_laws_by_hand():
    # 1e5 bytes take 8 ms at 100 Mbit/s, which leaves 2, 2 and 5 ns per parameter.
    rows = [row(10**6, 10.0), row(2 * 10**6, 12.0), row(4 * 10**6, 28.0, held_bytes=80 * 10**6, compile_s=3.0)]
    lines = growth._against_law(rows[2], [*rows, row(10**6, 99.0, method="sign"), row(10**6, 99.0, sweep="hosts")])
    assert lines["ms_median_by_law"] == pytest.approx(28 / (8 + 4 * 2))
    assert lines["bytes_kernel_by_law"] == pytest.approx(1.1)
    assert lines["compile_s_by_law"] == pytest.approx(1.5)
    assert lines["held_bytes_by_law"] == pytest.approx(80 / 160)


@pytest.mark.slow
def test_a_file_is_filled(tmp_path, capsys, monkeypatch):
    path, figure = tmp_path / "growth.json", tmp_path / "growth.png"
    fields = {"sizes": "1000,3e14", "hosts": "2", "density": "0.01,0.1", "size": 1e3, "rate": "none", "steps": 1}
    config = Config(**fields, method="plump_dp,topk", json=path, figure=figure)
    growth.main(config)
    assert "300,000,000,000,000 parameters on 2 hosts take some" in capsys.readouterr().out
    rows = json.loads(path.read_text())
    result = [(r["sweep"], r["method"], r["parameters"], r["hosts"], r["density"]) for r in rows]
    assert result == [
        *[("parameters", method, 1000, 2, 0.01) for method in ("plump_dp", "topk")],
        *[("hosts", method, 1000, 2, 0.01) for method in ("plump_dp", "topk")],
        *[("density", method, 1000, 4, 0.01) for method in ("plump_dp", "topk")],
        ("density", "topk", 1000, 4, 0.1),
    ]
    assert figure.stat().st_size > 10_000
    monkeypatch.setattr(growth, "_measure", lambda *_: pytest.fail("nothing is left"))
    growth.main(config)


def test_rows_of_other_settings(tmp_path, capsys, monkeypatch):
    """They stay in the file, and neither stand for others nor are they shown."""

    def measure(config, setting):
        fields = row(setting["parameters"], 10.0, hosts=setting["hosts"], method=setting["method"], control="cubic")
        return fields | {"rate": config.rate, "density": setting["density"], "sweep": setting["sweep"]}

    monkeypatch.setattr(growth, "_measure", measure)
    fields = {"sizes": "1e6", "hosts": "2", "density": "0.01", "size": 1e6, "method": "plump_dp", "steps": 2}
    places = {"json": tmp_path / "growth.json", "figure": tmp_path / "growth.png"}
    for changes, count in (({}, 3), ({}, 3), ({"rate": "500kbit"}, 6), ({"steps": 3}, 9), ({"size": 2e6}, 11)):
        capsys.readouterr()
        growth.main(Config(**{**fields, **places, **changes}))
        assert len(json.loads(places["json"].read_text())) == count
        assert capsys.readouterr().out.count("plump_dp") == 3
    with pytest.raises(ValueError, match="--rate must be a positive number with its unit; got '100mbit/1gbit'"):
        growth.main(Config(**fields, **places, rate="100mbit/1gbit"))
    assert growth._law(row(10**6, 0.0, rate="500kbit"), [row(10**6, 1600.0, rate="500kbit")])["ms_median"] == 1600.0
