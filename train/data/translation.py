"""Prepares translations.

python -m train.data.translation prepare --input FOLDER --out FOLDER     # train.de, train.en, valid.*, test.*
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

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

    def run(self) -> None:
        """Prepares the text and prints what it holds."""
        root, languages = resolve_data_dir(self.out), (self.source, self.target)
        check_new(root / folder_of("iwslt14"))
        pairs = read_parallel(self.input, languages)
        lengths = Lengths(self.vocabulary_size, self.source_length, self.target_length)
        facts = prepare_pairs("iwslt14", pairs, languages, lengths, root)
        print(json.dumps(facts, indent=2))


def main(args: list[str] | None = None) -> int:
    """Runs a command; returns 0, or 2 for input that cannot be used."""
    command = tyro.extras.subcommand_cli_from_dict({"prepare": Prepare}, args=args)
    try:
        command.run()
    except (ValueError, OSError) as error:
        print(f"translation: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
