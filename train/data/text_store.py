"""Translations on disk: subwords are learned once, and every pair is stored as two rows of numbers of fixed length.

    FOLDER/subwords.model           of sentencepiece: byte pair encoding of both languages together
    FOLDER/SPLIT.npy                rows of source (S,) and target (T,), padded
    FOLDER/SPLIT.LANGUAGE           the text of the same rows, for BLEU
    FOLDER/dropped.tsv              split, place and reason of every pair that was dropped
    FOLDER/prepared.json            what they are: counts, lengths, padding

Subwords come from sentencepiece: it is trained from a list of sentences to the same model every time, one vocabulary
for both languages, and gives the text back, spaces and punctuation included, so that BLEU is taken of plain text. It is
one wheel without dependencies.

All batches have one shape, as every shape is another program to compile: what is shorter is padded, and `prepared.json`
tells how much of the rows is padding. What is longer is dropped and counted, in every split: BLEU of a test split with
dropped pairs is not that of the whole one. Lower the lengths to waste less, raise them to drop less.
"""

import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import numpy as np
import sentencepiece

from train.data.info import Batch, TranslationInfo, check_split
from train.data.placing import move_into_place, private_folder
from train.data.text_pairs import SPLITS, Pair, texts_of

FORMAT = 1  # of the prepared folder
FACTS = "prepared.json"
PADDING, BEGIN, END, UNKNOWN = 0, 1, 2, 3

CATALOGS_VERSION = "1.0.0"
HOW_TO_PREPARE = {
    "help": "python -m train.data.translation prepare-help --out {root}",
    "iwslt14": "python -m train.data.translation prepare --input FOLDER --out {root}",
}


@dataclass(frozen=True)
class Lengths:
    """The sizes of a prepared translation.

    Attributes:
      vocabulary_size: subwords of both languages together, the four marks included.
      source: S, of a row of the source.
      target: T, of a row of the target; begin and end take two of it.
    """

    vocabulary_size: int
    source: int
    target: int

    def __post_init__(self):
        if self.source < 1 or self.target < 3:
            raise ValueError(
                "a source has at least 1 number and a target 3, of which two are begin and end; got "
                f"{self.source} and {self.target}"
            )


def prepare_pairs(
    name: str,
    pairs: Mapping[str, list[Pair]],
    languages: tuple[str, str],
    lengths: Lengths,
    root: Path,
    *,
    version: str = "",
    keep_first: bool = False,
    left_out: Mapping[str, int] | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Learns subwords from the train split and stores all splits in `root/name`, which appears when it is whole.

    Args:
      name: of the dataset.
      pairs: of "train", "valid" and "test".
      languages: of source and target.
      lengths: of rows and vocabulary.
      root: the folder of all datasets.
      version: a folder below `root/name`, if not empty.
      keep_first: whether another process may prepare the same text at the same time; the first one's folder stays.
      left_out: what was left out of `pairs` already, by reason; for `prepared.json`.
      say: takes the lines that tell what was dropped.

    Returns:
      What is in `prepared.json`.

    Raises:
      ValueError: if the vocabulary is too large or too small for the text, if a split keeps no pair, or if the folder
        is prepared already.
    """
    target = root / name / version
    if not keep_first:
        check_new(target)
    with private_folder(root, name) as private:
        built = private / "built"
        built.mkdir()
        model = train_subwords(texts_of(pairs["train"]), lengths.vocabulary_size)
        (built / "subwords.model").write_bytes(model)
        subwords = Subwords(model)
        splits, checksum = {}, crc32(model)
        with (built / "dropped.tsv").open("w", encoding="utf-8") as dropped:
            for split in SPLITS:
                rows, kept, counts = _encode(pairs[split], split, subwords, lengths, dropped)
                if not kept:
                    raise ValueError(
                        f"every split needs a pair; of the {len(pairs[split])} of {split} all were dropped "
                        f"({_list(counts)}). Raise the lengths, or look at the text"
                    )
                np.save(built / f"{split}.npy", rows)
                checksum = crc32(rows.tobytes(), checksum)
                for language, texts in zip(
                    languages, ([p.source for p in kept], [p.target for p in kept]), strict=True
                ):
                    (built / f"{split}.{language}").write_bytes("".join(f"{text}\n" for text in texts).encode())
                if counts:
                    say(f"{split}: {counts.total()} of {len(pairs[split])} pairs are dropped: {_list(counts)}")
                splits[split] = {
                    "rows": len(rows),
                    "dropped": dict(counts),
                    "source_padding": float(np.mean(rows["source"] == PADDING)),
                    "target_padding": float(np.mean(rows["target"] == PADDING)),
                    "unknown": float(np.mean(np.any(rows["target"] == UNKNOWN, axis=1))),
                }
        facts = {
            "format": FORMAT,
            "name": name,
            "version": version,
            "languages": languages,
            "vocabulary_size": lengths.vocabulary_size,
            "source_length": lengths.source,
            "target_length": lengths.target,
            "left_out": dict(left_out or {}),
            "splits": splits,
            "crc32": checksum,
        }
        (built / FACTS).write_text(json.dumps(facts, indent=2) + "\n")  # last: it says that the rest is there
        if not move_into_place(built, target, private, is_prepared) and not keep_first:
            check_new(target)
    return facts


def check_new(folder: Path) -> None:
    """Refuses to prepare what is there already; commands ask before they read anything.

    Raises:
      ValueError: if the folder holds prepared text.
    """
    if is_prepared(folder):
        raise ValueError(f"text is prepared into a new folder; {folder} holds some already. Remove it, or pass another")


def train_subwords(texts: list[str], vocabulary_size: int) -> bytes:
    """Learns a joint vocabulary by byte pair encoding; the same texts give the same bytes.

    Raises:
      ValueError: if the text has fewer subwords, or more characters, than the vocabulary is to have.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary_size,
            character_coverage=1.0,
            normalization_rule_name="identity",  # text comes back as it was
            max_sentence_length=1 << 24,  # bytes; longer lines would be skipped without a word
            pad_id=PADDING,
            bos_id=BEGIN,
            eos_id=END,
            unk_id=UNKNOWN,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"the text must have enough subwords for a vocabulary of {vocabulary_size}, and no more characters than "
            f"that; sentencepiece says: {error}. Pass another --vocabulary-size"
        ) from None
    return model.getvalue()


class Subwords:
    """From text to numbers and back."""

    def __init__(self, model: bytes):
        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)  # type: ignore[call-arg]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Returns the numbers of each text, without begin and end."""
        return self._model.encode(texts)

    def decode(self, rows: np.ndarray) -> list[str]:
        """Returns the text of each row (n, length): up to the first end; begin, padding and unknown are no text."""
        texts = []
        for row in np.asarray(rows).tolist():
            row = row[: row.index(END)] if END in row else row
            texts.append(self._model.decode([number for number in row if number > UNKNOWN]))
        return texts


def _encode(
    pairs: list[Pair], split: str, subwords: Subwords, lengths: Lengths, dropped: IO[str]
) -> tuple[np.ndarray, list[Pair], Counter[str]]:
    """Returns the rows, the pairs they come from, and the counts of what was dropped."""
    kept, sources, targets, counts = [], [], [], Counter()
    encoded = (subwords.encode([pair.source for pair in pairs]), subwords.encode([pair.target for pair in pairs]))
    for pair, source, target in zip(pairs, *encoded, strict=True):
        reason = None
        if not source or not target:
            reason = "empty"
        elif len(source) > lengths.source:
            reason = f"source longer than {lengths.source}"
        elif len(target) + 2 > lengths.target:
            reason = f"target longer than {lengths.target}"
        if reason:
            counts[reason] += 1
            dropped.write(f"{split}\t{pair.place}\t{reason}\n")
            continue
        kept.append(pair)
        sources.append(source)
        targets.append([BEGIN, *target, END])
    rows = np.zeros(len(kept), [("source", "<i4", (lengths.source,)), ("target", "<i4", (lengths.target,))])
    for row, source, target in zip(rows, sources, targets, strict=True):
        row["source"][: len(source)] = source
        row["target"][: len(target)] = target
    return rows, kept, counts


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


def is_prepared(folder: Path) -> bool:
    """Tells whether a folder holds a prepared translation."""
    return (folder / FACTS).exists()


def translation_info(name: str, root: Path) -> TranslationInfo:
    """Returns what is known of a prepared translation; prepares that of "catalogs" where it is missing.

    Raises:
      FileNotFoundError: if the user has yet to prepare it, or Django is not installed.
      ValueError: if it was prepared by another version of this file.
    """
    facts = _facts(name, root)
    rows = {split: facts["splits"][split]["rows"] for split in SPLITS}
    return TranslationInfo(
        name,
        rows["train"],
        rows["test"],
        rows["valid"],
        tuple(facts["languages"]),
        facts["vocabulary_size"],
        facts["source_length"],
        facts["target_length"],
    )


def open_translation(name: str, split: str, root: Path) -> "TranslationSplit":
    """Opens a split of a prepared translation: "train", "valid" or "test".

    Raises:
      FileNotFoundError: if the user has yet to prepare it.
      ValueError: if the split is unknown, or the folder is not whole.
    """
    check_split(split, SPLITS)
    facts = _facts(name, root)
    path = _folder(name, root) / f"{split}.npy"
    wanted = facts["splits"][split]["rows"]
    try:
        rows = np.load(path, mmap_mode="r")
        found = f"{len(rows)} rows"
    except (OSError, ValueError) as error:
        rows, found = None, str(error)
    if rows is None or len(rows) != wanted:
        raise ValueError(
            f"{path} must hold {wanted} rows; got {found}. Copy it again, or remove {path.parent} and prepare it anew"
        )
    return TranslationSplit(rows, {"crc32": f"{facts['crc32']:08x}"})


class TranslationSplit:
    """Batches of one split; nothing is random about a pair.

    Attributes:
      identity: a checksum of the vocabulary and all rows.
    """

    def __init__(self, rows: np.ndarray, identity: Mapping[str, str]):
        self._rows = rows
        self.identity = identity

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, rows: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Reads rows (b,) as "source" (b, S) and "target" (b, T), int32."""
        del seeds
        taken = self._rows[rows]
        return {name: np.ascontiguousarray(taken[name]) for name in ("source", "target")}


@dataclass(frozen=True)
class Text:
    """What BLEU is taken of.

    Attributes:
      subwords: turn rows of numbers into text.
      sources: text of the rows of the split, in their order.
      references: the same of the targets.
    """

    subwords: Subwords
    sources: list[str]
    references: list[str]


def translation_text(name: str, split: str, root: Path) -> Text:
    """Reads the text of a split of a prepared translation."""
    check_split(split, SPLITS)
    facts, folder = _facts(name, root), _folder(name, root)
    sources, references = (
        (folder / f"{split}.{language}").read_bytes().decode().removesuffix("\n").split("\n")
        for language in facts["languages"]
    )
    return Text(Subwords((folder / "subwords.model").read_bytes()), sources, references)


def prepare_catalogs(root: Path) -> None:
    """Prepares the messages of Django, where they are missing: a second or two."""
    from train.data.text_catalogs import catalog_pairs, catalog_version

    version = f"{CATALOGS_VERSION}-{catalog_version()}"
    if is_prepared(root / "catalogs" / version):
        return
    pairs, left_out = catalog_pairs()
    lengths = Lengths(vocabulary_size=1_000, source=24, target=24)
    prepare_pairs("catalogs", pairs, ("de", "en"), lengths, root, version=version, keep_first=True, left_out=left_out)


def _folder(name: str, root: Path) -> Path:
    if name != "catalogs":
        return root / name
    from train.data.text_catalogs import catalog_version

    return root / name / f"{CATALOGS_VERSION}-{catalog_version()}"


def _facts(name: str, root: Path) -> dict[str, Any]:
    if name == "catalogs":
        prepare_catalogs(root)
    folder = _folder(name, root)
    if not is_prepared(folder):
        raise FileNotFoundError(
            f"{name} must be prepared before it is used; looked for {folder / FACTS}. Prepare it by\n  "
            f"{HOW_TO_PREPARE[name].format(root=root)}\nIf it lies elsewhere, pass data_dir or set TFDS_DATA_DIR"
        )
    facts = json.loads((folder / FACTS).read_text())
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"{folder} must have format {FORMAT}; it has {facts.get('format')}. Remove it and prepare it anew"
        )
    return facts
