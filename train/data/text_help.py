"""German-English pairs from LibreOffice's help (MPL-2.0), as Debian packages it: its pages share paths and marks.

A paragraph has the same mark, `<p id="par_id3156045">`, in the page of either language. The packages are read where
they are; nothing of them is part of this repository.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from zlib import crc32

from train.data.text_pairs import Pair

PACKAGES = ("libreoffice-help-de", "libreoffice-help-en-us")
PAGES = {"de": "usr/share/libreoffice/help/de/text", "en": "usr/share/libreoffice/help/en-US/text"}
APT_USER = "_apt"
HELD_OUT = 20  # one page in so many goes to valid, and one to test


def fetch_packages(folder: Path, say: Callable[[str], None]) -> None:
    """Downloads the two packages, 5 MB, by `apt-get download`, and unpacks them into a folder; installs nothing.

    Raises:
      ValueError: if this is no Debian system, or apt-get or dpkg fails.
    """
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise ValueError(
                f"downloading the help needs {tool}, which is not here. Unpack {' and '.join(PACKAGES)} on a Debian "
                "system by `dpkg -x`, and pass the folder by --unpacked"
            )
    with tempfile.TemporaryDirectory() as downloads:
        _give_to_apt(downloads)
        say(f"downloading {' and '.join(PACKAGES)}")
        _run(["apt-get", "download", *PACKAGES], downloads)
        for package in sorted(Path(downloads).glob("*.deb")):
            _run(["dpkg", "-x", str(package), str(folder)], downloads)


def _give_to_apt(folder: str) -> None:
    """Makes the user that apt-get downloads as, when root calls it, the owner of a folder, which no other may write.

    Where there is no such user, apt-get downloads as root.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(LookupError):
            shutil.chown(folder, APT_USER)


def _run(command: list[str], folder: str) -> None:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if ended.returncode:
        raise ValueError(
            f"`{' '.join(command)}` must end well; it ended with {ended.returncode}: {ended.stderr.strip()[-500:]}. "
            "Try `apt-get update`, or pass unpacked packages by --unpacked"
        )


def help_pairs(folder: Path) -> tuple[dict[str, list[Pair]], Counter[str]]:
    """Reads the pairs of paragraphs that both languages have.

    Whole pages are held out, so that no test page was seen in training; which, a hash of the path tells. A pair that a
    page repeats from an earlier one is left out, and one of the train split that is also in a held-out page.

    Args:
      folder: where the packages are unpacked.

    Returns:
      Pairs (German, English) of "train", "valid" and "test", and how many were left out for which reason.

    Raises:
      FileNotFoundError: if there are no pages.
    """
    roots = {language: folder / path for language, path in PAGES.items()}
    for root in roots.values():
        if not root.is_dir():
            raise FileNotFoundError(f"the help of both languages must be unpacked in {folder}; there is no {root}")
    pages = {path.relative_to(root).as_posix() for root in roots.values() for path in root.rglob("*.html")}
    pairs: dict[str, list[Pair]] = {"train": [], "valid": [], "test": []}
    left_out: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    # Held-out pages first: what they share with others is left out of the train split.
    for page in sorted(pages, key=lambda page: (split_of_page(page) == "train", page)):
        if not all((root / page).is_file() for root in roots.values()):
            left_out["page of one language"] += 1
            continue
        german, english = (paragraphs((roots[language] / page).read_text("utf-8")) for language in ("de", "en"))
        left_out["paragraph of one language"] += len(german.keys() ^ english.keys())
        for mark in (mark for mark in german if mark in english):
            source, target = german[mark], english[mark]
            if source is None or target is None:
                left_out["mark used twice on a page"] += 1
            elif not source or not target:
                left_out["empty"] += 1
            elif source == target:
                left_out["not translated"] += 1
            elif (source, target) in seen:
                left_out["seen before"] += 1
            else:
                seen.add((source, target))
                pairs[split_of_page(page)].append(Pair(source, target, f"{page}#{mark}"))
    return pairs, left_out


def split_of_page(page: str) -> str:
    """Returns the split of a page, a fixed function of its path."""
    return {0: "valid", 1: "test"}.get(crc32(page.encode()) % HELD_OUT, "train")


def paragraphs(page: str) -> dict[str, str | None]:
    """Returns the text of each marked paragraph of a page; None for a mark that is used twice."""
    parser = _Paragraphs()
    parser.feed(page)
    parser.close()
    return parser.found


class _Paragraphs(HTMLParser):
    """Collects text within `<p id="par_id...">`; of text that differs between programs, the first variant."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.found: dict[str, str | None] = {}
        self._mark: str | None = None
        self._text: list[str] = []
        self._spans: list[list] = []  # of each open span: is it a switch, variants so far, is it left out

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "p":
            self._end()
            mark = attributes.get("id") or ""
            self._mark = mark if mark.startswith("par_id") else None
        elif tag == "span" and self._mark:
            is_variant = bool(self._spans) and self._spans[-1][0]
            if is_variant:
                self._spans[-1][1] += 1
            is_later = is_variant and self._spans[-1][1] > 1
            self._spans.append([attributes.get("class") == "switchinline", 0, is_later])
        elif tag == "br":
            self._text.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._end()
        elif tag == "span" and self._spans:
            self._spans.pop()

    def handle_data(self, data: str) -> None:
        if self._mark and not any(is_later for _, _, is_later in self._spans):
            self._text.append(data)

    def _end(self) -> None:
        if self._mark:
            self.found[self._mark] = None if self._mark in self.found else " ".join("".join(self._text).split())
        self._mark, self._text, self._spans = None, [], []
