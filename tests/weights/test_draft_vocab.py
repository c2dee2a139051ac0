import os

import numpy as np
import pytest

from strata_jax.errors import BadFileError, UsageError
from strata_jax.weights.draft_vocab import format_draft_vocab, most_frequent, read_draft_vocab


def written(tmp_path, text):
    path = tmp_path / "ids.txt"
    path.write_text(text)
    return path


def test_reads_ids_between_comments_and_empty_lines(tmp_path):
    path = written(tmp_path, "# english\n0\n\n  7 # a word\n12\n")

    ids = read_draft_vocab(path, 13)

    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 7, 12]


def test_reads_what_it_writes(tmp_path):
    (tmp_path / "ids.txt").write_text(format_draft_vocab([9, 3, 3, 4], "made by a test"))

    assert read_draft_vocab(tmp_path / "ids.txt", 10).tolist() == [3, 4, 9]
    assert (tmp_path / "ids.txt").read_text().startswith("# made by a test\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no id"),
        ("# nothing\n", "names no id"),
        ("1\nx\n", r"ids.txt:2: 'x', an id from 0 to 9 expected"),
        ("-1\n", r"ids.txt:1: '-1'"),
        ("10\n", r"ids.txt:1: '10', an id from 0 to 9"),
        ("1.0\n", r"ids.txt:1: '1.0'"),
        ("1 2\n", r"ids.txt:1: '1 2'"),
        ("4\n4\n", r"ids.txt:2: id 4 after 4, ascending"),
        ("4\n3\n", r"ids.txt:2: id 3 after 4, ascending"),
        ("\u0663\n", r"ids.txt:1: '\u0663', an id"),
        ("9" * 5000, r"ids.txt:1: '9{40}', an id"),
    ],
)
def test_names_the_line_that_is_wrong(tmp_path, text, message):
    with pytest.raises(BadFileError, match=message):
        read_draft_vocab(written(tmp_path, text), 10)


def test_names_a_file_that_is_not_there(tmp_path):
    with pytest.raises(BadFileError, match=r"none.txt: No such file or directory, a draft vocab"):
        read_draft_vocab(tmp_path / "none.txt", 10)


def test_refuses_what_has_no_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # a reader would wait for a writer

    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(BadFileError, match=f"{path}: is no regular file, a draft vocab"):
            read_draft_vocab(path, 10)


def test_names_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\xff\x00")

    with pytest.raises(BadFileError, match=r"model.gguf: is no text of ids"):
        read_draft_vocab(path, 10)


def test_chooses_the_most_frequent_and_says_how_much_they_cover():
    ids, share = most_frequent([5, 5, 5, 2, 2, 9, 8], always=[1, 9], count=4)

    assert ids == [1, 2, 5, 9]
    assert share == 6 / 7


def test_chooses_the_lower_of_equally_frequent_ids():
    assert most_frequent([4, 3, 2], always=(), count=2)[0] == [2, 3]


@pytest.mark.parametrize(
    ("ids", "count", "problem"), [([5], 0, "--count=0"), ([5], -3, "--count=-3"), ([], 9, "empty")]
)
def test_chooses_at_least_one(ids, count, problem):
    with pytest.raises(UsageError, match=problem):
        most_frequent(ids, always=(), count=count)
