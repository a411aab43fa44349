"""The table of all methods in `docs/methods.md`, from their docstrings: `python -m docs.methods_table` writes it."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxcomm.methods import METHODS

PAGE = Path(__file__).with_name("methods.md")
BEGIN, END = "<!-- written by python -m docs.methods_table -->\n\n", "\n<!-- end -->"


def table() -> str:
    """Returns a row for each method, as Markdown."""
    rows = [("method", "what it does", "received by each worker", "memory", "source"), ("---",) * 5]
    rows += [_row(factory) for factory in METHODS.values()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(page: str) -> str:
    """Returns the text of the page with the table as it should be."""
    before, after = page.index(BEGIN) + len(BEGIN), page.index(END)
    return page[:before] + table() + page[after:]


def _row(factory: Callable[..., Any]) -> tuple[str, ...]:
    source = re.search(r"Source: (.*?\d{4})", " ".join((factory.__doc__ or "").split()))
    summary = (factory.__doc__ or "").partition("\n")[0].rstrip(".").replace("|", r"\|")
    return (
        _call(factory),
        summary,
        _sentence(factory, "Received"),
        _sentence(factory, "Memory"),
        source[1] if source else "",
    )


def _call(factory: Callable[..., Any]) -> str:
    """Returns a call with the defaults of the positional arguments, and with the names of those without default."""
    arguments = []
    for name, parameter in inspect.signature(factory).parameters.items():
        has_default = parameter.default is not parameter.empty
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            arguments.append(repr(parameter.default) if has_default else name)
        elif not has_default:
            arguments.append(f"{name}=...")
    return f"`{factory.__name__}({', '.join(arguments)})`"


def _sentence(factory: Callable[..., Any], title: str) -> str:
    """Returns what follows "Received:" or "Memory:" in the docstring of a method, or else of its nearest base."""
    kind = inspect.unwrap(factory)
    for base in getattr(kind, "__mro__", (kind,)):
        text = " ".join((base.__doc__ or "").split())
        if said := re.search(rf"\b{title}: (.*?)\.(?= |$)", text):
            return said[1]
    raise ValueError(f"The docstring of {factory.__name__} must say its {title}; got none. Write '{title}: ...'.")


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
