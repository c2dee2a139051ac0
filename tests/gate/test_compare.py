from pathlib import Path

import numpy as np
import pytest

from strata_jax.gate.compare import (
    Difference,
    IdDifference,
    compare_ids,
    compare_logits,
    load_logits,
    summarise,
)

NANS = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)


def _logits(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


@pytest.mark.parametrize(
    ("reference", "other", "expected"),
    [
        ([1, 2], [1, 2], None),
        ([], [], None),
        ([1, 2, 3], [1, 4, 5], IdDifference(index=1, reference=2, other=4)),
        ([1, 2], [1], IdDifference(index=1, reference=2, other=None)),
        ([], [1], IdDifference(index=0, reference=None, other=1)),
    ],
)
def test_finds_the_first_id_that_differs(reference, other, expected):
    assert compare_ids(reference, other) == expected


def test_equal_logits_do_not_differ():
    logits = _logits([1, np.inf], [np.nan, -0.0])

    assert compare_logits(logits, logits.copy()) is None


def test_finds_the_earliest_position():
    reference = np.zeros((3, 4), np.float32)
    other = reference.copy()
    other[1, 3] = other[2, 0] = other[2, 1] = 1

    found = compare_logits(reference, other)

    assert found is not None
    assert (found.position, found.token_id, found.num_values, found.num_positions) == (1, 3, 3, 2)
    assert (found.reference.text, found.other.text) == ("0.0", "1.0")
    assert found.other.bits == "0x3f800000"


def test_finds_a_difference_behind_the_first_chunk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("strata_jax.gate.compare._CHUNK_VALUES", 8)
    reference = np.zeros((9, 4), np.float32)
    other = reference.copy()
    other[5, 2] = 1

    found = compare_logits(reference, other)

    assert found is not None
    assert (found.position, found.token_id) == (5, 2)
    assert summarise(other).sha256 != summarise(reference).sha256


def test_a_single_bit_and_the_sign_of_zero_differ():
    one = _logits([1.0])

    assert compare_logits(one, np.nextafter(one, np.float32(2))) is not None
    assert compare_logits(_logits([0.0]), _logits([-0.0])) is not None


def test_compares_nans_by_position():
    left, right = _logits([0, 1]), _logits([0, 1])
    left[0, 0], right[0, 0] = NANS

    assert compare_logits(left, right) is None
    assert summarise(left).sha256 == summarise(right).sha256
    assert compare_logits(left, _logits([0, 1])) is not None


def test_compares_as_far_as_both_go():
    reference = np.zeros((3, 2), np.float32)

    assert compare_logits(reference, reference[:2]) is None


def test_summarises():
    logits = _logits([np.nan, np.nan], [np.nan, 1], [0, 1])

    summary = summarise(logits)

    assert (summary.positions, summary.vocabulary) == (3, 2)
    assert (summary.num_nan, summary.rows_without_number) == (3, 1)
    assert summarise(logits[:0]).positions == 0


def test_tells_where_the_prompt_ends():
    reference = np.zeros((5, 2), np.float32)
    other = reference.copy()
    other[4, 1] = 0.5
    difference = Difference(
        prompt="long",
        ids=IdDifference(index=2, reference=7, other=None),
        finish_reasons=("length", "stop"),
        logits=compare_logits(reference, other),
        positions=(5, 4),
    )

    lines = difference.lines(prompt_tokens=3)

    assert lines == [
        "prompt long: position 4 (answer), logit of id 1: 0.0 (0x00000000) against 0.5 "
        "(0x3f000000); 1 logits at 1 positions differ",
        "prompt long: answer id 2: 7 against the end",
        "prompt long: ended by length against stop",
        "prompt long: logits of 5 positions against 4",
    ]
    assert "position 4 (prompt)" in difference.lines(prompt_tokens=5)[0]


def test_loads_what_generate_writes(tmp_path: Path):
    np.save(tmp_path / "logits.npy", np.ones((2, 3), np.float32))

    assert load_logits(tmp_path / "logits.npy").shape == (2, 3)


@pytest.mark.parametrize("content", [b"", b"no array", None])
def test_refuses_what_is_no_logits(tmp_path: Path, content: bytes | None):
    path = tmp_path / "logits.npy"
    if content is None:
        np.save(path, np.ones(3))
    else:
        path.write_bytes(content)

    with pytest.raises(ValueError, match=r"."):
        load_logits(path)
