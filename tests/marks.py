"""Which settings of a test are slow, written beside them."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(settings: Iterable[Any], *usual: Any) -> list[Any]:
    """The settings of a parametrized test, of which all but the usual ones are in the slow tier."""
    settings = list(settings)
    if missing := [value for value in usual if value not in settings]:
        raise ValueError(f"usual must be some of the settings {settings}; got {missing}. Name those that exist.")
    marks = [() if value in usual else pytest.mark.slow for value in settings]
    return [
        pytest.param(*(value if type(value) is tuple else (value,)), marks=mark)
        for value, mark in zip(settings, marks, strict=True)
    ]
