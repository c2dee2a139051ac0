"""Drafts from known answers."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from strata_jax.engine.scripted_drafter import DraftScript, ScriptedDrafter
from strata_jax.errors import UsageError

NONE = np.zeros(0, np.float32)
TEXT = np.arange(10, 40, dtype=np.int32)


def drafts(percent, count=8, texts=(TEXT,), read: Sequence[int] = tuple(TEXT[1:5])):
    drafter = ScriptedDrafter(list(texts), percent)
    drafter.read(np.asarray(read, np.int32), NONE, 0)
    return drafter.draft(count).ids


def test_goes_on_as_the_text_does():
    assert drafts(100).tolist() == TEXT[5:13].tolist()
    assert drafts(100, count=99).tolist() == TEXT[5:].tolist()


@pytest.mark.parametrize(("percent", "right"), [(0, 0), (50, 4), (25, 2), (75, 6)])
def test_spoils_its_share(percent, right):
    assert np.count_nonzero(drafts(percent) == TEXT[5:13]) == right


def test_takes_the_text_that_begins_like_the_sequence():
    other = np.concatenate([TEXT[:5], TEXT[:5]])

    assert drafts(100, texts=(other, TEXT), read=tuple(TEXT[1:6])).tolist() == TEXT[6:14].tolist()
    assert drafts(100, read=[1, 2, 3]).tolist() == []


def test_begins_anew():
    drafter = ScriptedDrafter([TEXT], 100)
    drafter.read(np.asarray([1]), NONE, 0)
    drafter.reset()
    drafter.read(TEXT[1:3], NONE, 0)
    drafter.read(TEXT[3:4], NONE, 2)

    assert drafter.draft(1).ids.tolist() == [TEXT[4]]


def test_loads_a_script(tmp_path: Path):
    path = tmp_path / "answers.json"
    path.write_text(json.dumps([TEXT.tolist(), []]))

    drafter = DraftScript(path=path, percent=100).load()
    drafter.read(TEXT[1:3], NONE, 0)

    assert drafter.draft(2).ids.tolist() == TEXT[3:5].tolist()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        '["a"]',
        "[[1], 2]",
        "[[[1]]]",
        '{"a": 1}',
        "[[1.5]]",
        "[[true]]",
        "[" * 100_000,
    ],
)
def test_refuses_what_is_no_script(tmp_path: Path, text: str):
    path = tmp_path / "answers.json"
    path.write_text(text)

    with pytest.raises(UsageError, match=r"draft_script: .*list of lists of ids expected"):
        DraftScript(path=path, percent=1).load()


def test_refuses_other_shares_and_missing_files(tmp_path: Path):
    with pytest.raises(UsageError, match="draft_script: 101 percent"):
        DraftScript(path=tmp_path / "none", percent=101).load()
    with pytest.raises(UsageError, match=r"draft_script: .*No such file"):
        DraftScript(path=tmp_path / "none", percent=1).load()
    with pytest.raises(UsageError, match=r"draft_script: /dev/zero: is no regular file"):
        DraftScript(path=Path("/dev/zero"), percent=1).load()
