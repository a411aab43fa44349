import warnings

import matplotlib.image
import pytest

from train.figures import draw_accuracy
from train.metrics import Evaluation

CURVE = [Evaluation(step, step * 1e5, {"loss": 1.0, "accuracy": step / 100}) for step in (10, 20)]
# One worker receives nothing.
SILENT = [Evaluation(step, 0.0, {"loss": 1.0, "accuracy": step / 100}) for step in (10, 20)]


@pytest.mark.parametrize("curves", [{"plump_dp": CURVE, "dct_dp": CURVE}, {"dct_dp": SILENT}, {"dct_dp": []}])
def test_the_figure_is_a_png_without_warnings(curves, tmp_path):
    path = tmp_path / "new" / "figure.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_accuracy(path, curves)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert matplotlib.image.imread(path).shape[2] in (3, 4)
