from functools import partial

import numpy as np

from models.mlp import Mlp
from tests.models.twins import count, crossing


def test_parameters_and_activations():
    make = partial(Mlp, (28, 28, 1), 10)
    assert count(make) == (784 + 1) * 300 + (300 + 1) * 100 + (100 + 1) * 10 == 266_610
    assert crossing(make, {"image": ((3, 28, 28, 1), np.float32)}) == [(3, 300), (3, 100), (3, 10)]
    assert count(partial(Mlp, (8, 8, 1), 10, hidden=())) == 650
