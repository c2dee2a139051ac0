"""GGUF files read in place: one file or shards, mapped, nothing copied.

Opening reads headers only. Views point into the mapping, so a table of any size opens at once and
takes no memory until its bytes are looked at. A file must not be shortened while it is open: the
system answers a read behind its new end by ending the process.
"""

import mmap
import os
import pathlib
import re
import stat

import numpy as np

from strata_jax.errors import BadFileError
from strata_jax.weights.gguf_header import Header, TensorInfo, read_header
from strata_jax.weights.gguf_values import Metadata

MAX_SHARDS = 512
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class GgufFile:
    """An open model file: metadata, tensors by name, read-only views on their bytes."""

    def __init__(self, paths: tuple[str, ...], maps: list[mmap.mmap], headers: list[Header]):
        self.paths = paths
        """The file, or its shards in order."""
        self.metadata: Metadata = headers[0].metadata
        self.tensors: dict[str, TensorInfo] = {}
        """All tensors of all shards by name, in directory order."""
        for header in headers:
            self.tensors.update(header.tensors)
        self.header_sizes = tuple(header.size for header in headers)
        """Bytes of metadata and directory of every shard."""
        self.sizes = tuple(len(each) for each in maps)
        """Bytes of every shard."""
        self.warnings = tuple(line for header in headers for line in header.warnings)
        self._maps = maps
        self._bytes = [np.frombuffer(each, np.uint8) for each in maps]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "GgufFile":
        """Maps a file, or all shards given the first one, and reads the headers.

        Raises:
            BadFileError: if a file is missing, unreadable, no GGUF v3 file, broken, or does not
                belong to the set; the message names the place.
        """
        paths = _shard_paths(os.fspath(path))
        maps: list[mmap.mmap] = []
        headers: list[Header] = []
        for index, each in enumerate(paths):
            maps.append(_map(each))
            headers.append(read_header(maps[-1], each, index))
        _check_shards(paths, headers)
        return cls(paths, maps, headers)

    def view(self, name: str) -> np.ndarray:
        """The bytes of a tensor: uint8 [nbytes], read-only, inside the mapping."""
        info = self._info(name)
        return self._open_bytes()[info.shard][info.offset : info.offset + info.nbytes]

    def address(self, name: str) -> int:
        """Memory address of a tensor's first byte, valid until `close`."""
        info = self._info(name)
        return self._open_bytes()[info.shard].__array_interface__["data"][0] + info.offset

    def header_bytes(self, shard: int) -> np.ndarray:
        """Metadata and directory of one shard: uint8 [header_sizes[shard]]."""
        return self._open_bytes()[shard][: self.header_sizes[shard]]

    def read_ahead(self, name: str) -> None:
        """Asks the system to start reading a tensor from disk; returns at once."""
        self._advise(name, mmap.MADV_WILLNEED)

    def expect_random(self, name: str) -> None:
        """Tells the system not to read around the single rows touched in a tensor."""
        self._advise(name, mmap.MADV_RANDOM)

    def close(self) -> None:
        """Lets go of the mapping. It disappears with the last view that is still held."""
        self.metadata.release()
        self._bytes.clear()
        self._maps.clear()

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise BadFileError(f"{self.paths[0]}: tensor {name} is not in the file")
        return self.tensors[name]

    def _open_bytes(self) -> list[np.ndarray]:
        assert self._bytes, f"{self.paths[0]} was used after it was closed"
        return self._bytes

    def _advise(self, name: str, advice: int) -> None:
        info = self._info(name)
        start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE  # madvise takes whole pages
        self._maps[info.shard].madvise(advice, start, info.offset + info.nbytes - start)


def _map(path: str) -> mmap.mmap:
    try:
        mode = pathlib.Path(path).stat().st_mode  # before opening: a pipe would wait for a writer
        if stat.S_ISDIR(mode):
            raise BadFileError(f"{path}: a folder, a .gguf file expected")
        if not stat.S_ISREG(mode):
            raise BadFileError(f"{path}: not a regular file, a .gguf file expected")
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(handle).st_size == 0:
                raise BadFileError(f"{path}: the file is empty, a .gguf file expected")
            return mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
    except (OSError, ValueError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadFileError(f"{path}: cannot be opened: {reason}") from None


def _shard_paths(path: str) -> tuple[str, ...]:
    """All files of the set that `path` is the first of; `path` alone if its name is no shard's."""
    match = _SHARD_NAME.fullmatch(path)
    if match is None:
        return (path,)
    number, count = int(match["number"]), int(match["count"])
    stem = match["stem"]
    if not 1 <= number <= count <= MAX_SHARDS:
        raise BadFileError(
            f"{path}: the name says shard {number} of {count}, 1 to {MAX_SHARDS} expected"
        )
    if number != 1:
        raise BadFileError(
            f"{path}: this is shard {number} of {count}, the first one expected: "
            f"{stem}-00001-of-{count:05}.gguf"
        )
    return tuple(f"{stem}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1))


def _check_shards(paths: tuple[str, ...], headers: list[Header]) -> None:
    first = headers[0].metadata
    if len(paths) == 1:
        count = first.get("split.count", 1)
        if count not in (0, 1):
            raise BadFileError(
                f"{paths[0]}: metadata split.count is {count!r}, but the name is not that of a "
                "shard, NAME-00001-of-0000N.gguf expected; do not rename shards"
            )
        return
    seen: dict[str, str] = {}
    total = sum(len(header.tensors) for header in headers)
    for index, (path, header) in enumerate(zip(paths, headers)):
        expected = {"split.no": index, "split.count": len(paths), "split.tensors.count": total}
        for key, value in expected.items():
            if header.metadata.get(key) != value:
                raise BadFileError(
                    f"{path}: metadata {key} is {header.metadata.get(key)!r}, {value} expected; "
                    "a shard is missing, of another set or renamed"
                )
        for name in header.tensors:
            if name in seen:
                raise BadFileError(f"{path}: tensor {name} is in {seen[name]} too")
            seen[name] = path
