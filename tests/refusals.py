"""How tests ask for a refusal: by the argument's name and the value, not by the sentence."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(call: Callable[[], Any], *said: Any) -> None:
    """Asserts that a call raises a ValueError whose message has all of this, such as a name and a value."""
    with pytest.raises(ValueError, match=r"must|got") as error:
        call()
    assert [part for part in map(str, said) if part not in str(error.value)] == [], str(error.value)


def refusals(*rows: tuple[Any, ...]) -> Any:
    """Parametrizes a test, which calls `refused(call, *said)`, over rows of a call and what its message says."""
    return pytest.mark.parametrize(
        ("call", "said"), [pytest.param(call, said, id=" ".join(said) or None) for call, *said in rows]
    )
