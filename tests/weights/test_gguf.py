import gc
import os
import pathlib
import socket
import time

import gguf
import numpy as np
import psutil
import pytest

from strata_jax.errors import BadFileError
from strata_jax.weights.gguf import GgufFile
from strata_jax.weights.gguf_types import GgmlType
from tests.gguf_maker import BLOCKY, make_model
from tests.gguf_writer import Pair, Tensor, patch, write_gguf

EMBEDDED = pathlib.Path(__file__).parents[2] / "strata_jax/models/strata-small/model-IQ3_S.gguf"


def small(path: pathlib.Path) -> pathlib.Path:
    data = np.arange(64, dtype=np.float32)
    tensors = [Tensor("a", (8, 8), 0, 256, data.tobytes()), Tensor("b", (4,), 0, 16, bytes(16))]
    write_gguf(path, [Pair("k", "u32", 7)], tensors)
    return path


def test_gives_views_on_the_mapping(tmp_path):
    with GgufFile.open(small(tmp_path / "f.gguf")) as file:
        view = file.view("a")

        assert view.dtype == np.uint8
        assert not view.flags.writeable
        assert view.view(np.float32).tolist() == list(range(64))
        assert view.ctypes.data == file.address("a")
        assert file.address("b") == file.address("a") + 256
        assert file.tensors["a"].type is GgmlType.F32
        assert file.metadata["k"] == 7


def test_names_a_tensor_it_does_not_have(tmp_path):
    with (
        GgufFile.open(small(tmp_path / "f.gguf")) as file,
        pytest.raises(BadFileError, match=r"f\.gguf: tensor c is not in the file"),
    ):
        file.view("c")


def test_keeps_views_readable_after_close(tmp_path):
    file = GgufFile.open(small(tmp_path / "f.gguf"))
    view = file.view("a")

    file.close()

    assert view.view(np.float32)[5] == 5
    with pytest.raises(AssertionError, match="used after it was closed"):
        file.view("a")


def test_unmaps_with_the_last_view(tmp_path):
    path = small(tmp_path / "mapped.gguf")
    file = GgufFile.open(path)
    file.close()
    del file
    gc.collect()

    assert str(path) not in pathlib.Path("/proc/self/maps").read_text()


def test_takes_advice_on_reading(tmp_path):
    with GgufFile.open(small(tmp_path / "f.gguf")) as file:
        file.read_ahead("b")
        file.expect_random("a")

        assert file.view("b").sum() == 0


def test_equals_the_gguf_package_on_the_embedded_model():
    theirs = gguf.GGUFReader(EMBEDDED)

    with GgufFile.open(EMBEDDED) as file:
        assert len(file.tensors) == len(theirs.tensors)
        for tensor in theirs.tensors:
            info = file.tensors[tensor.name]
            assert info.shape == tuple(int(size) for size in tensor.shape)
            assert info.type == tensor.tensor_type
            assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
            assert np.array_equal(file.view(tensor.name), tensor.data.reshape(-1).view(np.uint8))
        for key, field in theirs.fields.items():
            if not key.startswith("GGUF."):
                value = field.contents()
                assert file.metadata[key] == (tuple(value) if isinstance(value, list) else value)


def test_is_readable_by_the_gguf_package_where_the_maker_wrote_it(tmp_path):
    made = make_model(tmp_path / "f.gguf", BLOCKY, types={"*_exps.*": 21, "token_embd*": 14})

    with GgufFile.open(made.path) as file:
        assert len(gguf.GGUFReader(made.path).tensors) == len(file.tensors)


def test_opens_a_table_of_320_million_rows_in_no_time_and_memory(tmp_path):
    rows = 320_001_536
    path = tmp_path / "table.gguf"
    write_gguf(path, [], [Tensor("table", (160, rows), 1, rows * 320)])
    process = psutil.Process()
    before = process.memory_info().rss

    start = time.perf_counter()
    with GgufFile.open(path) as file:
        took_s = time.perf_counter() - start
        grown = process.memory_info().rss - before
        last_row = file.view("table")[-320:]

        assert file.tensors["table"].nbytes == 102_400_491_520
        assert last_row.sum() == 0
    assert took_s < 0.1
    assert grown < 4 << 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.gguf", "cannot be opened: No such file or directory"),
        (".", "a folder, a .gguf file expected"),
        ("f.gguf/inside", "cannot be opened: Not a directory"),
        ("nul\0byte", "cannot be opened: "),
        ("x" * 5000, "cannot be opened: File name too long"),
        ("loop", "cannot be opened: Too many levels of symbolic links"),
        ("empty", "the file is empty"),
        ("pipe", "not a regular file"),
        ("socket", "not a regular file"),
        ("/dev/zero", "not a regular file"),
    ],
)
def test_says_why_a_path_cannot_be_read(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    small(tmp_path / "f.gguf")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")

        with pytest.raises(BadFileError, match=message) as error:
            GgufFile.open(name)

    assert str(error.value).startswith(name)


def test_says_that_reading_is_not_allowed(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)

    with pytest.raises(BadFileError, match="cannot be opened: Permission denied"):
        GgufFile.open(small(tmp_path / "f.gguf"))


def test_leaves_no_file_open_behind_an_error(tmp_path):
    path = small(tmp_path / "f.gguf")
    patch(path, 0, b"FUGG")
    before = len(list(pathlib.Path("/proc/self/fd").iterdir()))

    with pytest.raises(BadFileError):
        GgufFile.open(path)
    gc.collect()

    assert len(list(pathlib.Path("/proc/self/fd").iterdir())) == before


@pytest.fixture
def shards(tmp_path):
    return make_model(tmp_path / "m.gguf", shards=3)


def test_joins_shards(tmp_path, shards):
    whole = make_model(tmp_path / "whole.gguf")

    with GgufFile.open(shards.path) as parts, GgufFile.open(whole.path) as one:
        assert list(parts.tensors) == list(one.tensors)
        assert {info.shard for info in parts.tensors.values()} == {0, 1, 2}
        assert parts.paths == tuple(str(path) for path in shards.paths)
        for name in one.tensors:
            assert np.array_equal(parts.view(name), one.view(name))


def test_accepts_a_first_shard_without_tensors(tmp_path):
    made = make_model(tmp_path / "m.gguf", shards=3, empty_first=True)

    with GgufFile.open(made.path) as file:
        assert {info.shard for info in file.tensors.values()} == {1, 2}


def test_accepts_a_set_of_one(tmp_path):
    one = {"split.no": ("u16", 0), "split.count": ("u16", 1), "split.tensors.count": ("i32", 145)}

    for name in ("m.gguf", "m-00001-of-00001.gguf"):
        made = make_model(tmp_path / name, pairs=one)
        GgufFile.open(made.path).close()


def test_asks_for_the_first_shard(shards):
    with pytest.raises(
        BadFileError, match=r"shard 2 of 3, the first one expected: .*00001-of-0000"
    ):
        GgufFile.open(shards.paths[1])


def test_names_a_missing_shard(shards):
    shards.paths[2].unlink()

    with pytest.raises(BadFileError, match=r"00003-of-00003.gguf: cannot be opened: No such file"):
        GgufFile.open(shards.path)


def test_refuses_a_renamed_shard(tmp_path, shards):
    path = shards.path.rename(tmp_path / "renamed.gguf")

    with pytest.raises(
        BadFileError, match=r"split.count is 3, but the name is not that of a shard"
    ):
        GgufFile.open(path)


@pytest.mark.parametrize("name", ["m-00000-of-00003.gguf", "m-00001-of-99999.gguf"])
def test_refuses_shard_numbers_out_of_range(tmp_path, name):
    with pytest.raises(BadFileError, match="the name says shard"):
        GgufFile.open(tmp_path / name)


def test_refuses_a_lone_file_under_a_shard_name(tmp_path):
    made = make_model(tmp_path / "m-00001-of-00002.gguf")
    make_model(tmp_path / "m-00002-of-00002.gguf")

    with pytest.raises(BadFileError, match=r"metadata split.no is None, 0 expected"):
        GgufFile.open(made.path)


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
@pytest.mark.parametrize("shard", [0, 1, 2])
def test_refuses_split_numbers_that_do_not_fit(shards, key, shard):
    patch(shards.paths[shard], shards.layouts[shard].values[key], b"\x09")

    with pytest.raises(BadFileError, match=rf"0000{shard + 1}-of-00003.gguf: metadata {key} is 9"):
        GgufFile.open(shards.path)


def test_refuses_shards_in_the_wrong_order(tmp_path, shards):
    shards.paths[1].rename(tmp_path / "other")
    shards.paths[2].rename(shards.paths[1])
    (tmp_path / "other").rename(shards.paths[2])

    with pytest.raises(
        BadFileError, match=r"00002-of-00003.gguf: metadata split.no is 2, 1 expect"
    ):
        GgufFile.open(shards.path)


def test_refuses_a_tensor_in_two_shards(shards):
    first = next(iter(shards.layouts[0].tensors))
    second = next(name for name in shards.layouts[1].entries if len(name) == len(first))
    patch(shards.paths[1], shards.layouts[1].entries[second] + 8, first.encode())

    with pytest.raises(BadFileError, match=f"00002-of-00003.gguf: tensor {first} is in .*00001-of"):
        GgufFile.open(shards.path)


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_names_the_shard_that_is_cut_by_one_byte(shards, shard):
    size = shards.paths[shard].stat().st_size
    os.truncate(shards.paths[shard], size - 1)

    try:
        file = GgufFile.open(shards.path)
    except BadFileError as error:
        line = str(error)
    else:
        (line,) = file.warnings  # the last byte was padding
    assert f"0000{shard + 1}-of-00003.gguf" in line
