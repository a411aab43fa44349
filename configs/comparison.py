"""The settings that `python -m train compare` trains: those of every method's paper, and those that papers compare."""

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

# The label of a setting in tables and figures, after the name of its method.
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
    ("fixed 0.01", Iwp(alpha=0.01)),  # one of the paper's four thresholds
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
    ("H=10, 2 fragments, 5 later", LocalSgd(steps=10, fragments=2, overlap=5, mix=0.5)),  # Streaming DiLoCo's mix
    ("p=10", PlumpDp(p=10)),
]


@dataclass(frozen=True)
class Comparison:
    """Train every method with several seeds, and compare accuracy, bytes, and the time on a slow link."""

    methods: str = "all"
    """Methods, separated by commas, by the names of their transformations (slim_dp); all by default. Dense is always
    included."""
    seeds: int = 5
    """Number of seeds, from 0, for the initial parameters and the order of the data."""
    rate: str = "100mbit"
    """Rate of a worker's link for the modelled time, in kbit, mbit or gbit."""
    steps: int | None = None
    """Training steps; those of the experiment if not given."""
    workers: int | None = None
    """Data-parallel workers, simulated; as many as in the experiment if not given."""
    out: Path = Path("runs")
    """Folder of all runs; a comparison makes a new folder in it for its table and figure."""
    data_dir: Path | None = None
    """Folder of prepared datasets; $TFDS_DATA_DIR or ~/tensorflow_datasets if not given."""
    delay: int = 0
    """Steps from a gradient to its exchange, 0 or 1, in all runs but the dense baseline. With 1 there is also a delayed
    dense row, and local methods are left out."""
    margin: float = 0.3
    """Points of accuracy below dense that count as equal; chosen before the run."""
    json: Path | None = None
    """File that gets a record of each run when it ends; runs that are in it are not trained again. A file with other
    settings is refused."""
