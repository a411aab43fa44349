"""The settings that `python -m train compare` trains: of every method its paper's, and those that papers compare."""

from dataclasses import dataclass
from pathlib import Path

from configs.methods import (
    DctDp,
    Demo,
    Dgc,
    Ef21,
    Iwp,
    LocalSgd,
    Method,
    PlumpDp,
    PowerSgd,
    QuantDp,
    RandomK,
    Sign,
    SlimDp,
    SparseLoco,
    TernGrad,
    TopK,
)

DENSE = PlumpDp()

# What tables and figures call a setting, beside the name of its method.
SETTINGS: list[tuple[str, Method]] = [
    ("", DENSE),
    ("98%", TopK(sparsity=0.98)),
    ("99%", TopK(sparsity=0.99)),
    ("99%, 2 bits a value", TopK(sparsity=0.99, value_dtype="2bit")),
    ("99%, residual in bfloat16", TopK(sparsity=0.99, residual_dtype="bfloat16")),
    ("98%", Ef21(sparsity=0.98)),
    ("99%", Ef21(sparsity=0.99)),
    ("98%", DctDp(sparsity=0.98)),
    ("99%", DctDp(sparsity=0.99)),
    ("98%, residual in bfloat16", DctDp(sparsity=0.98, residual_dtype="bfloat16")),
    ("99%, L=1000", DctDp(sparsity=0.99, life_span=1000)),  # the paper's life-span, and the transformation's default
    ("90%", RandomK(sparsity=0.9)),
    ("98%", Dgc(sparsity=0.98)),
    ("99.9%", Dgc(sparsity=0.999)),
    ("k=32", Demo(k=32)),
    ("k=8", Demo(k=8)),
    ("fixed 25", Iwp()),
    ("fixed 0.01", Iwp(alpha=0.01)),  # one of the paper's four
    ("layer-wise", Iwp(alpha=12.5, beta=0.01)),
    ("8 bits", QuantDp(bits=8)),
    ("4 bits", QuantDp(bits=4)),
    ("2 bits", QuantDp(bits=2)),
    ("", TernGrad()),
    ("", Sign()),
    ("rank 4", PowerSgd(rank=4)),
    ("rank 1", PowerSgd(rank=1)),
    ("(0.3, 0)", SlimDp(alpha=0.3, beta=0.0)),
    ("(0.3, 0.15)", SlimDp(alpha=0.3, beta=0.15)),
    ("(0.3, 0.3)", SlimDp(alpha=0.3, beta=0.3)),
    ("(0.3, 0.15) carry", SlimDp(alpha=0.3, beta=0.15, unsent="carry")),
    ("H=10", SparseLoco(steps=10)),
    ("H=10", LocalSgd(steps=10)),
    ("H=10, top-k 98%", LocalSgd(steps=10, exchange_sparsity=0.98)),
    ("H=10, outer 0.9", LocalSgd(steps=10, outer_momentum=0.9)),  # DiLoCo's momentum, for hundreds of exchanges
    ("H=10, 2 fragments", LocalSgd(steps=10, fragments=2)),
    ("H=10, 2 fragments, 5 later", LocalSgd(steps=10, fragments=2, overlap=5, mix=0.5)),  # as Streaming DiLoCo mixes
    ("p=10", PlumpDp(p=10)),
]


@dataclass(frozen=True)
class Comparison:
    """Train every method with several seeds, and compare accuracy, bytes, and the time that a slow link would take."""

    methods: str = "all"
    """Methods, separated by commas, as their transformations are called (slim_dp); all by default. Dense always is."""
    seeds: int = 5
    """Seeds, from 0: of the initial parameters and of the order of the data."""
    rate: str = "100mbit"
    """Speed of a worker's link for the modelled time, as kbit, mbit or gbit."""
    steps: int | None = None
    """Training steps; those of the experiment if not given."""
    workers: int | None = None
    """Data-parallel workers, simulated; as many as in the experiment if not given."""
    out: Path = Path("runs")
    """Folder of all runs; a comparison makes a new one in it for its table and figure."""
    data_dir: Path | None = None
    """Folder of prepared datasets; $TFDS_DATA_DIR or ~/tensorflow_datasets if not given."""
    delay: int = 0
    """Steps from a gradient to its exchange, 0 or 1, of all but the dense runs that the others are compared with. With
    1 there is a delayed dense row, too, and none of local methods."""
    margin: float = 0.3
    """Points of accuracy below dense that do not count; chosen before the run."""
    json: Path | None = None
    """File for the runs, a record each as soon as it ends; what it has is not trained again. One of other settings is
    refused."""
