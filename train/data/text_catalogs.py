"""German-English pairs from Django's message catalogs (BSD), which its wheel holds: real text, nothing to download."""

import gettext
import importlib.metadata
import importlib.util
from collections import Counter
from pathlib import Path
from zlib import crc32

from train.data.text_pairs import Pair

HELD_OUT = 10  # one pair in 10 goes to valid, and one to test


def catalog_pairs() -> tuple[dict[str, list[Pair]], Counter[str]]:
    """Reads the catalogs of the Django that is installed.

    Returns:
      Pairs (German, English) of "train", "valid" and "test", and the number left out, by reason. A hash of the English
      message decides its split.

    Raises:
      FileNotFoundError: if Django is not installed.
    """
    pairs: dict[str, list[Pair]] = {"train": [], "valid": [], "test": []}
    left_out: Counter[str] = Counter()
    sentences: set[str] = set()
    root = _django()
    for path in sorted(root.rglob("locale/de/LC_MESSAGES/*.mo")):
        for english, german in sorted(_messages(path).items()):
            if not english or not german:
                left_out["empty"] += 1
            elif english == german:
                left_out["not translated"] += 1
            elif english in sentences:
                left_out["seen before"] += 1
            else:
                sentences.add(english)
                split = {0: "valid", 1: "test"}.get(crc32(english.encode()) % HELD_OUT, "train")
                pairs[split].append(Pair(german, english, f"{path.relative_to(root)}: {english[:40]}"))
    return pairs, left_out


def catalog_version() -> str:
    """Returns the version of the installed Django: another version has other messages."""
    _django()
    return importlib.metadata.version("django")


def _django() -> Path:
    spec = importlib.util.find_spec("django")  # found, not imported
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "Django must be installed for the dataset catalogs, which is read from its message catalogs; got none. Run "
            "`pip install django`, or take another dataset."
        )
    return Path(spec.submodule_search_locations[0])


def _messages(path: Path) -> dict[str, str]:
    """Returns the messages of a catalog, each on one line; of those with a plural, the first form."""
    with path.open("rb") as file:
        # The standard library reads the format, but has no public way to list what it has read.
        catalog = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    messages: dict[str, str] = {}
    for key, translation in sorted(catalog.items(), key=repr):
        message, form = key if isinstance(key, tuple) else (key, 0)
        if form == 0:
            message = message.rpartition("\x04")[2]  # after the context of a message that has one
            messages.setdefault(" ".join(message.split()), " ".join(translation.split()))
    return messages
