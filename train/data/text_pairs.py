"""Pairs of sentences, and the parallel text files that hold them, one sentence a line."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Pair:
    """A sentence and its translation.

    Attributes:
      source: text of one line.
      target: text of one line.
      place: where it comes from, for the list of what was dropped.
    """

    source: str
    target: str
    place: str


def read_parallel(folder: Path, languages: tuple[str, str]) -> dict[str, list[Pair]]:
    """Reads train, valid and test, each from two files such as `train.de` and `train.en`; line i of both is a pair.

    Args:
      folder: where the six files are.
      languages: of source and target, the suffixes of the file names.

    Returns:
      The pairs of each split, in the order of the files, empty lines included.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if two files have different numbers of lines, or a line is not UTF-8.
    """
    paths = {split: [folder / f"{split}.{language}" for language in languages] for split in SPLITS}
    gaps = [path for split_paths in paths.values() for path in split_paths if not path.is_file()]
    if gaps:
        raise FileNotFoundError(
            "Parallel text must be six files, SPLIT.LANGUAGE with one sentence a line; got no "
            f"{', '.join(map(str, gaps))}. Pass the folder by --input and the languages by --source and --target."
        )
    pairs = {}
    for split, (first, second) in paths.items():
        sources, targets = _lines(first), _lines(second)
        if len(sources) != len(targets):
            raise ValueError(
                f"Line i of one file must be the translation of line i of the other; got {len(sources)} lines in "
                f"{first} and {len(targets)} in {second}. Align them anew: an empty line keeps the place of a missing "
                "sentence."
            )
        line_pairs = enumerate(zip(sources, targets, strict=True), 1)
        pairs[split] = [Pair(source, target, f"{first.name}:{line}") for line, (source, target) in line_pairs]
    return pairs


def _lines(path: Path) -> list[str]:
    """Splits at line feeds alone: Unicode's other separators occur within sentences."""
    lines = path.read_bytes().split(b"\n")
    if not lines[-1]:
        lines.pop()  # after the last line feed
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(line.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise ValueError(
                f"Text must be UTF-8; got line {number} of {path}, which is not ({error.reason} at byte "
                f"{error.start}). Convert it."
            ) from None
    return texts


def texts_of(pairs: Iterable[Pair]) -> list[str]:
    """Returns sources and targets, in turn, without the empty ones."""
    return [text for pair in pairs for text in (pair.source, pair.target) if text]
