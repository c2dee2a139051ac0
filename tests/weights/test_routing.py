import json
import os
from pathlib import Path

import numpy as np
import pytest

from strata_jax.errors import BadFileError
from strata_jax.weights.routing import RoutedModel, RoutingReader, RoutingWriter, count_routing

MODEL = RoutedModel("abc", 3, 8)
HEADER = '{"format":"strata-routing-1","model":"abc","layers":3,"experts":8}\n'


def _file(tmp_path: Path, *lines: str, header: str = HEADER) -> Path:
    path = tmp_path / "routing"
    path.write_text(header + "".join(lines))
    return path


def _refused(path: Path) -> str:
    with pytest.raises(BadFileError) as error:
        list(RoutingReader(path))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    return str(error.value)


def test_reads_what_was_written(tmp_path: Path):
    path = tmp_path / "routing"
    with RoutingWriter(path, MODEL) as writer:
        writer.add(0, [[1, 2], [2, 7]])
        writer.add(2, np.asarray([[5, 0]], np.int32))
        writer.add(1, np.zeros((0, 2), np.int32))

    reader = RoutingReader(path)
    records = [(layer, ids.tolist()) for layer, ids in reader]

    assert reader.model == MODEL
    assert records == [(0, [[1, 2], [2, 7]]), (2, [[5, 0]]), (1, [])]
    assert not reader.is_cut
    assert path.read_text() == (
        HEADER
        + '{"layer":0,"ids":[[1,2],[2,7]]}\n{"layer":2,"ids":[[5,0]]}\n{"layer":1,"ids":[]}\n'
    )


def test_counts_every_use(tmp_path: Path):
    path = _file(
        tmp_path, '{"layer": 0, "ids": [[1, 2], [2, 7]]}\n', '{"layer": 0, "ids": [[2]]}\n'
    )

    counts = count_routing(RoutingReader(path))

    assert counts.shape == (3, 8)
    assert counts[0].tolist() == [0, 1, 3, 0, 0, 0, 0, 1]
    assert counts[1:].sum() == 0


def test_leaves_out_a_last_line_that_was_cut_off(tmp_path: Path):
    whole = '{"layer": 0, "ids": [[1, 2]]}\n'
    for length in range(1, len(whole) - 1):
        reader = RoutingReader(_file(tmp_path, whole, whole[:length]))

        assert len(list(reader)) == 1
        assert reader.is_cut


def test_a_last_line_may_lack_its_end(tmp_path: Path):
    reader = RoutingReader(_file(tmp_path, '{"layer": 0, "ids": [[1, 2]]}'))

    assert len(list(reader)) == 1
    assert not reader.is_cut


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{\n", "line 2"),
        ("[]\n", '{"layer": l, "ids": [[...], ...]} expected'),
        ("\n", "line 2"),
        ("null\n", "line 2"),
        ('{"layer": 0}\n', "ids"),
        ('{"layer": 3, "ids": []}\n', "layer 3, 0 to 2 expected"),
        ('{"layer": -1, "ids": []}\n', "layer -1"),
        ('{"layer": true, "ids": []}\n', "layer True"),
        ('{"layer": 0, "ids": 1}\n', "no list of rows"),
        ('{"layer": 0, "ids": [1]}\n', "no list of rows"),
        ('{"layer": 0, "ids": [[1], [1, 2]]}\n', "rows of 1 and of 2 experts"),
        ('{"layer": 0, "ids": [[8]]}\n', "not from 0 to 7"),
        ('{"layer": 0, "ids": [[-1]]}\n', "not from 0 to 7"),
        (f'{{"layer": 0, "ids": [[{10**30}]]}}\n', "not from 0 to 7"),
        (f'{{"layer": 0, "ids": [[{"9" * 5000}]]}}\n', "line 2"),
        ('{"layer": 0, "ids": [[1.0]]}\n', "no whole number"),
        ('{"layer": 0, "ids": [[true]]}\n', "no whole number"),
        ('{"layer": 0, "ids": [["1"]]}\n', "no whole number"),
        ('{"layer": 0, "ids": [[2, 2]]}\n', "names an expert twice"),
        ("[" * 100_000 + "\n", "line 2"),
    ],
)
def test_names_the_line_that_is_broken(tmp_path: Path, line: str, expected: str):
    message = _refused(_file(tmp_path, line))

    assert expected in message
    assert "line 2" in message


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", "is empty"),
        ("\n", "strata-routing-1"),
        ("hello\n", "strata-routing-1"),
        ("[]\n", "strata-routing-1"),
        ('{"format": "strata-profile-1"}\n', "strata-routing-1"),
        (HEADER.replace('"abc"', "1"), '"model" is 1'),
        (HEADER.replace('"abc"', '""'), "\"model\" is ''"),
        (HEADER.replace("3", "0"), '"layers" is 0'),
        (HEADER.replace('"layers":3,', ""), '"layers" is None'),
        (HEADER.replace("8", "1e3"), '"experts" is 1000.0'),
        (HEADER.replace("8", "9999999"), '"experts" is 9999999'),
    ],
)
def test_refuses_what_are_no_records(tmp_path: Path, header: str, expected: str):
    assert expected in _refused(_file(tmp_path, header=header))


def test_refuses_what_is_no_text_file(tmp_path: Path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    assert "is no text" in _refused(binary)
    assert "is no file" in _refused(pipe)
    assert "is no file" in _refused(tmp_path)
    assert "No such file" in _refused(tmp_path / "none")


def test_says_which_file_cannot_be_written(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        RoutingWriter(tmp_path / "none" / "routing", MODEL)


def test_the_header_is_one_object(tmp_path: Path):
    assert json.loads(HEADER)["layers"] == 3
