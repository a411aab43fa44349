"""The table of all methods is that of their docstrings."""

from docs.methods_table import PAGE, with_table


def test_the_table_is_current():
    page = PAGE.read_text()
    assert page == with_table(page), "run python -m docs.methods_table"
