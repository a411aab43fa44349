"""Every link inside the documentation leads to a file, and to a heading that is in it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def text_of(page):
    """Returns the text of a page, or of the file that it includes, without its code."""
    text = page.read_text()
    if included := re.search(r"^```\{include\} (\S+)$", text, re.MULTILINE):
        return text_of(page.parent / included[1])
    return re.sub(r"^(`{3,}|:{3,}).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(text):
    """Returns the anchors of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page):
    """Returns the links of a page that lead nowhere."""
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    targets = []
    for link in links:
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(text_of(target))):
            targets.append(link)
    return targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_headings(page):
    if "{include}" not in page.read_text():  # its links are those of the file that it includes
        assert broken(page) == []


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# A heading, with `code`\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-heading-with-code) [b](there.md#none) [c](none.md) [d](https://none) [e](#none)\n")
    assert broken(page) == ["there.md#none", "none.md", "#none"]


def test_a_page_opens_with_its_answer():
    pages = sorted((ROOT / "docs" / "measurements").glob("*.md"))
    index = (ROOT / "docs" / "measurements" / "index.md").read_text()
    for page in pages:
        heading, answer = page.read_text().split("\n\n", 2)[:2]
        assert heading.startswith("# ")
        assert not answer.startswith(("    ", "|", "#", "-"))
        assert page.stat().st_size <= 9_500, page.name
        assert page.name == "index.md" or f"({page.name})" in index
