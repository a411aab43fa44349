"""Translations as TFDS datasets: every pair is two rows of numbers of fixed length, and its text, for BLEU.

Alongside the records are `subwords.model`, sentencepiece's byte pair encoding of both languages together;
`metadata.json`, with counts, lengths and padding; and `dropped.tsv`, with the split, place and reason of every dropped
pair.

Subwords come from sentencepiece. Trained on the same sentences, it gives the same model every time, with one vocabulary
for both languages. It gives the text back, spaces and punctuation included, so that BLEU is computed on plain text. It
is one wheel without dependencies.

All batches have one shape, as every shape is another program to compile. Shorter rows are padded; `metadata.json` has
the fraction of padding. Longer pairs are dropped and counted, in every split: BLEU of a test split with dropped pairs
is not that of the whole split. Lower the lengths to waste less, raise them to drop less.
"""

import io
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import numpy as np
import sentencepiece

from train.data.info import RowTypes, TranslationInfo
from train.data.placing import preparing
from train.data.rows import Prepared, write_rows
from train.data.text_catalogs import catalog_pairs, catalog_version
from train.data.text_pairs import SPLITS, Pair, texts_of

VERSION = "1.0.0"  # of the prepared data: must change when the same pairs get other numbers
PADDING, BEGIN, END, UNKNOWN = 0, 1, 2, 3
TEXT_TYPES: RowTypes = dict.fromkeys(("source_text", "target_text"), ((), np.dtype(object)))


@dataclass(frozen=True)
class Lengths:
    """The sizes of a prepared translation.

    Attributes:
      vocabulary_size: subwords of both languages together, including padding, begin, end and unknown.
      source: S, numbers in a row of the source.
      target: T, numbers in a row of the target; begin and end are two of them.
    """

    vocabulary_size: int
    source: int
    target: int

    def __post_init__(self):
        if self.source < 1 or self.target < 3:
            raise ValueError(
                "A source must have at least 1 number and a target 3, of which two are begin and end; got "
                f"{self.source} and {self.target}."
            )


def prepare_pairs(
    name: str,
    pairs: Mapping[str, list[Pair]],
    languages: tuple[str, str],
    lengths: Lengths,
    root: Path,
    *,
    keep_first: bool = False,
    left_out: Mapping[str, int] | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Learns subwords from the train split and stores all splits in `folder_of(name)`, which appears when it is whole.

    Args:
      name: of the dataset.
      pairs: of "train", "valid" and "test".
      languages: of source and target.
      lengths: of rows and vocabulary.
      root: the folder of all datasets.
      keep_first: whether another process may prepare the same text at the same time; the first one's folder is kept.
      left_out: the number of pairs left out of `pairs` already, by reason; for the facts.
      say: called with each line about dropped pairs.

    Returns:
      The facts in `metadata.json`.

    Raises:
      ValueError: if the vocabulary is too large or too small for the text, if a split keeps no pair, or if the folder
        is prepared already.
    """
    folder = folder_of(name)
    with preparing(root, folder, keep_first=keep_first) as private:
        model = train_subwords(texts_of(pairs["train"]), lengths.vocabulary_size)
        (private / folder).mkdir(parents=True)
        (private / folder / "subwords.model").write_bytes(model)
        subwords = Subwords(model)
        columns, splits, checksum = {}, {}, crc32(model)
        with (private / folder / "dropped.tsv").open("w", encoding="utf-8") as dropped:
            for split in SPLITS:
                rows, pairs_of_rows, counts = _encode(pairs[split], split, subwords, lengths, dropped)
                if not pairs_of_rows:
                    raise ValueError(
                        f"Every split must have a pair; got all of the {len(pairs[split])} of {split} dropped "
                        f"({_list(counts)}). Raise the lengths, or look at the text."
                    )
                checksum = crc32(rows.tobytes(), checksum)
                columns[split] = {
                    "source": rows["source"],
                    "target": rows["target"],
                    "source_text": np.array([pair.source for pair in pairs_of_rows], object),
                    "target_text": np.array([pair.target for pair in pairs_of_rows], object),
                }
                if counts:
                    say(f"{split}: {counts.total()} of {len(pairs[split])} pairs are dropped: {_list(counts)}")
                splits[split] = {
                    "rows": len(rows),
                    "dropped": dict(counts),
                    "source_padding": float(np.mean(rows["source"] == PADDING)),
                    "target_padding": float(np.mean(rows["target"] == PADDING)),
                    "unknown": float(np.mean(np.any(rows["target"] == UNKNOWN, axis=1))),
                }
        sizes = (splits[split]["rows"] for split in ("train", "test", "valid"))
        info = TranslationInfo(name, *sizes, languages, lengths.vocabulary_size, lengths.source, lengths.target)
        extra_facts = {"left_out": dict(left_out or {}), "splits": splits}
        return write_rows(private, folder, columns, info, {"crc32": f"{checksum:08x}"}, extra_facts)


def train_subwords(texts: list[str], vocabulary_size: int) -> bytes:
    """Learns a joint vocabulary by byte pair encoding; the same texts give the same bytes.

    Raises:
      ValueError: if the text has fewer subwords, or more characters, than the vocabulary should have.
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
            max_sentence_length=1 << 24,  # bytes; longer lines would be skipped silently
            pad_id=PADDING,
            bos_id=BEGIN,
            eos_id=END,
            unk_id=UNKNOWN,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"The text must have enough subwords for a vocabulary of {vocabulary_size}, and no more characters than "
            f"that; got from sentencepiece: {error}. Pass another --vocabulary-size."
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
        """Returns the text of each row (n, length), up to the first end; begin, padding and unknown are left out."""
        texts = []
        for row in np.asarray(rows).tolist():
            row = row[: row.index(END)] if END in row else row
            texts.append(self._model.decode([number for number in row if number > UNKNOWN]))
        return texts


def _encode(
    pairs: list[Pair], split: str, subwords: Subwords, lengths: Lengths, dropped: IO[str]
) -> tuple[np.ndarray, list[Pair], Counter[str]]:
    """Returns the rows, the pairs they come from, and the counts of what was dropped."""
    pairs_of_rows, sources, targets, counts = [], [], [], Counter()
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
        pairs_of_rows.append(pair)
        sources.append(source)
        targets.append([BEGIN, *target, END])
    rows = np.zeros(len(pairs_of_rows), [("source", "<i4", (lengths.source,)), ("target", "<i4", (lengths.target,))])
    for row, source, target in zip(rows, sources, targets, strict=True):
        row["source"][: len(source)] = source
        row["target"][: len(target)] = target
    return rows, pairs_of_rows, counts


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


@dataclass(frozen=True)
class Text:
    """The text that BLEU is computed on.

    Attributes:
      subwords: turn rows of numbers into text.
      sources: text of the rows of the split, in their order.
      references: the same of the targets.
    """

    subwords: Subwords
    sources: list[str]
    references: list[str]


def translation_text(name: str, split: str, root: Path) -> Text:
    """Reads the text of a split of a prepared translation, and its subwords.

    Raises:
      ValueError: if the subwords are missing or damaged.
    """
    rows = TRANSLATIONS[name].open(split, root, TEXT_TYPES)
    text = rows.read(np.arange(len(rows)), None)
    sources, references = ([sentence.decode() for sentence in text[column]] for column in TEXT_TYPES)
    path = root / folder_of(name) / "subwords.model"
    try:
        subwords = Subwords(path.read_bytes())
        subwords.encode(references[:1])  # an empty file is read without an error
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"{path} must hold the subwords of {name}; got {error}. Copy the folder again, or remove it and prepare it "
            "anew."
        ) from None
    return Text(subwords, sources, references)


def folder_of(name: str) -> Path:
    """Returns a translation's folder, below that of all datasets; "catalogs" has one for each version of Django."""
    return Path(name, f"django-{catalog_version()}", VERSION) if name == "catalogs" else Path(name, VERSION)


def prepare_catalogs(root: Path) -> None:
    """Prepares the messages of Django: a second or two."""
    pairs, left_out = catalog_pairs()
    lengths = Lengths(vocabulary_size=1_000, source=24, target=24)
    prepare_pairs("catalogs", pairs, ("de", "en"), lengths, root, keep_first=True, left_out=left_out)


HOW = "Prepare it by\n  python -m train.data.translation prepare --input FOLDER --out {root}"
TRANSLATIONS = {
    "catalogs": Prepared(TranslationInfo, lambda: folder_of("catalogs"), build=prepare_catalogs),
    "iwslt14": Prepared(TranslationInfo, lambda: folder_of("iwslt14"), HOW),
}
