"""Values that no benchmark can run with are refused on the command line, before a host starts or anything compiles."""

import runpy
import sys

import pytest

from benchmarks.netlab import Lab

# The module, its arguments, and parts of its one line: names and values.
REFUSED = [
    ("exchange", "--method topk,adam", "--method", "naive; got adam"),
    ("exchange", "--shapes vgg", "--shapes", "resnet50", "got 'vgg'"),
    ("exchange", "--rate none,fast", "rate", "got 'fast'"),
    ("exchange", "--hosts 0", "hosts", "got 0"),
    ("exchange", "--rate 1mbit:fast", "rate", "got 'fast'"),
    ("exchange", "--delay 50", "delay", "got '50'"),
    ("exchange", "--jitter soon", "jitter", "got 'soon'"),
    ("exchange", "--slow 0.5", "slow", "got 0.5"),
    ("exchange", "--device cpu --delay 50ms", "--delay", "got delay 50ms"),
    ("exchange", "--steps 0", "--steps", "got 0"),
    ("exchange", "--rounds 0", "--rounds", "got 0"),
    ("exchange", "--sparsity 1.0", "sparsity", "got 1.0"),
    ("exchange", "--device abacus", "--device", "got 'abacus'"),
    ("tpu", "--method topk,adam", "--method", "plump_dp", "got adam"),
    ("tpu", "--slices 0", "--slices", "got 0"),
    ("gpu", "--gpu v100", "--gpu", "h100, a100; got v100"),
    ("gpu", "--topology 4", "--topology", "got '4'"),
    ("gpu", "--topology 0x4", "--topology", "got '0x4'"),
    ("startup", "--repeats 1", "--repeats", "got 1"),
    ("delay", "--methods adam", "--methods", "plump_dp(bfloat16)"),
    ("delay", "--steps 0", "--steps", "got 0"),
    ("late_multiply", "--layers 4096", "got '4096'"),
    ("late_multiply", "--layers 0x3", "got '0x3'"),
    ("late_multiply", "--hosts 2,x", "--hosts", "got 'x'"),
    ("late_multiply", "--hosts 0", "--hosts", "got '0'"),
    ("late_multiply", "--rate fast", "rate", "got 'fast'"),
    ("late_multiply", "--steps 0", "--steps", "got 0"),
    ("late_multiply", "--batch 6", "got 6 for 4 hosts"),
    ("late_multiply", "--batch 0", "got 0 for 2 hosts"),
    ("late_multiply", "--crossover --layers 4x4,5x5", "--crossover", "got 4x4,5x5"),
    ("gpt", "--experiment digits", "--experiment", "got 'digits'"),
    ("gpt", "--seeds 0", "--seeds", "got 0"),
    ("gpt", "--steps 1 --evaluations 2", "--steps", "--evaluations", "got 1, 2"),
    ("gpt", "--batch 3", "--batch", "got 3"),
    ("gpt", "--batch 4 --hosts 3", "--batch", "got 4"),
    ("gpt", "--stages 2 --hosts 2", "--hosts", "got --hosts 2"),
    ("gpt", "--stages 2 --micro-batches 3", "--micro-batches", "16 rows in 3"),
    ("gpt", "--rate 1mbit,2mbit", "--rate", "got 1mbit,2mbit"),
    ("gpt", "--methods dense,topk2", "--methods", "got topk2"),
    ("gpt", "--stages 2 --methods topk", "--methods", "got topk"),
    ("gpt_fsdp", "--seeds 0", "--seeds"),
    ("gpt_fsdp", "--batch 5", "--batch"),
    ("gpt_fsdp", "--experiment digits", "--experiment", "got 'digits'"),
    ("growth", "--sizes 1e5,many", "--sizes", "many"),
    ("growth", "--sizes 0", "--sizes", "got '0'"),
    ("growth", "--hosts 1,2", "--hosts", "got '1'"),
    ("growth", "--density 0.5,1", "--density", "0.5,1"),
    ("growth", "--size 0", "--size", "0.0"),
    ("hybrid", "--devices two", "--devices", "two"),
    ("hybrid", "--devices 1,2", "--devices", "got 1,2 and 256"),
    ("hybrid", "--devices 2,3", "--devices", "got 2,3 and 256"),
    ("hybrid", "--image 32", "--image", "got 32"),
    ("hybrid_dct", "--workers 1", "--workers", "got 1"),
    ("hybrid_dct", "--stages 4", "--stages", "got 2, 2048 and 4"),
    ("hybrid_dct", "--batch 7", "--batch", "7"),
    ("hybrid_dct", "--rate 1gbit,10gbit", "--rate", "1gbit,10gbit"),
    ("hybrid_dct", "--sparsity 1.0", "sparsity", "got 1.0"),
    ("patches", "--steps 0", "at least 1", "0"),
    ("embeddings", "--workers two", "--workers", "two"),
    ("embeddings", "--workers 3", "--workers", "got 3 and 128"),
    ("density", "--workers four", "--workers", "four"),
    ("density", "--workers 0,4", "--workers", "got 0,4"),
    ("density", "--publishers 1,5", "--publishers", "got 4,16,48,96, 1,5"),
    ("density", "--kept 0.01,1", "--kept", "0.01,1"),
    ("density", "--samples 31", "--samples", "got 30, 31"),
    ("density", "--rows 20", "--rows", "20 for 96"),
    ("faults", "--hosts 1", "--hosts", "got 1"),
    ("faults", "--slow 0", "slow", "got 0"),
    ("faults", "--mtbf nan", "--mtbf", "got nan"),
    ("faults", "--minutes 0", "--minutes", "got 0"),
    ("faults", "--json /", "--json", "got the folder /"),
]


@pytest.mark.parametrize(
    ("module", "argv", "message"),
    [pytest.param(name, argv, message, id=f"{name} {argv}") for name, argv, *message in REFUSED],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_one_line(module, argv, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *argv.split()])
    monkeypatch.setattr(Lab, "__enter__", lambda _: pytest.fail("hosts start"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{module}", run_name="__main__", alter_sys=True)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"{module}: ")
    assert line.count("\n") == 1
    assert [part for part in message if part not in line] == [], line
