#!/usr/bin/env python3
"""Writes a draft vocabulary: the ids that texts of one kind are made of, most frequent first.

    .venv/bin/python tools/draft_vocab.py --model=MODEL.gguf --count=32768 TEXT... > ids.txt

Special tokens (ends of turns, of thoughts) are always among them. A text of another language or kind is
then answered as always, only with fewer drafts that come true. Format: `weights/draft_vocab.py`.
"""

import argparse
import sys
from pathlib import Path

from strata_jax.errors import StrataError
from strata_jax.text.tokenizer import Tokenizer
from strata_jax.weights.draft_vocab import format_draft_vocab, most_frequent
from strata_jax.weights.gguf import GgufFile


def main() -> int:
    """Reads the texts; prints the file, and to stderr how much of the texts it covers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="GGUF file whose tokenizer counts")
    parser.add_argument("--count", type=int, default=32768, help="ids to choose")
    parser.add_argument("texts", nargs="+", type=Path, help="files of UTF-8 text")
    arguments = parser.parse_args()
    try:
        metadata = GgufFile.open(arguments.model).metadata
        tokenizer = Tokenizer.from_metadata(metadata)
        ids = [
            token
            for path in arguments.texts
            for token in tokenizer.encode(path.read_text("utf-8"), special=True)
        ]
        chosen, share = most_frequent(ids, sorted(tokenizer.special_ids), arguments.count)
    except (StrataError, OSError, UnicodeDecodeError) as error:
        print(f"draft_vocab: {error}", file=sys.stderr)
        return 1
    names = " ".join(path.name for path in arguments.texts)
    comment = f"{len(chosen)} ids of {Path(arguments.model).name}, from {names}"
    sys.stdout.write(format_draft_vocab(chosen, comment))
    print(
        f"{len(chosen)} ids cover {100 * share:.2f} % of {len(ids)} of the texts", file=sys.stderr
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
