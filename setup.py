"""The description of the package; pyproject.toml has the rest.

An index shows README.md without the files that it links to. With a `Repository` among the [project.urls] of
pyproject.toml, links and images become those of the repository; without one, links become their text, and images go.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent
LINK = re.compile(r"```.*?```|(!?)\[([^\]]*)\]\(((?!https?://|#)[^)\s]+)\)", re.DOTALL)  # code, or a relative link


def description(text: str, repository: str | None) -> str:
    """Returns a page whose links do not depend on the files beside it.

    Args:
      text: the page, in Markdown.
      repository: its address, https://HOST/OWNER/NAME; None if there is none.
    """

    def absolute(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        if target is None:
            return match[0]
        if repository is None:
            return "" if image else label
        return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/HEAD/{target})"

    return LINK.sub(absolute, text)


def readme() -> str:
    """Returns the description of this package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return description((ROOT / "README.md").read_text(), project.get("urls", {}).get("Repository"))


if __name__ == "__main__":
    from setuptools import setup

    setup(long_description=readme(), long_description_content_type="text/markdown")
