"""Prepares translations.

python -m train.data.translation prepare --input FOLDER --out FOLDER     # train.de, train.en, valid.*, test.*
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from train.data.commands import run_command
from train.data.info import resolve_data_dir
from train.data.placing import check_new
from train.data.text_pairs import read_parallel
from train.data.text_store import Lengths, folder_of, prepare_pairs


@dataclass(frozen=True)
class Prepare:
    """Prepare parallel text files, one sentence a line, as the dataset "iwslt14"."""

    input: Path
    """Folder of train.LANGUAGE, valid.LANGUAGE and test.LANGUAGE for both languages, UTF-8, not tokenized."""
    out: Path | None = None
    """Folder of all datasets, the trainer's --data-dir; $TFDS_DATA_DIR or ~/tensorflow_datasets if not given."""
    source: str = "de"
    """Language to translate from: the suffix of its files' names."""
    target: str = "en"
    """Language to translate to."""
    vocabulary_size: int = 10_000
    """Subwords of both languages together."""
    source_length: int = 128
    """Subwords of a source; pairs with longer ones are dropped, shorter ones padded."""
    target_length: int = 128
    """Subwords of a target, begin and end included."""

    def run(self) -> dict[str, Any]:
        """Prepares the text; returns what it holds."""
        root, languages = resolve_data_dir(self.out), (self.source, self.target)
        check_new(root / folder_of("iwslt14"))
        pairs = read_parallel(self.input, languages)
        lengths = Lengths(self.vocabulary_size, self.source_length, self.target_length)
        return prepare_pairs("iwslt14", pairs, languages, lengths, root)


main = partial(run_command, "translation", {"prepare": Prepare})

if __name__ == "__main__":
    sys.exit(main())
