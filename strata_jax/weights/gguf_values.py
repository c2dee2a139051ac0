"""The key-value part of a GGUF header, every length checked against the bytes that are left.

    magic "GGUF" | version u32 | tensor count u64 | pair count u64
    pair:   key string | value type u32 | value
    string: length u64 | UTF-8 bytes          array: element type u32 | count u64 | elements

Source: ggml-org/ggml docs/gguf.md (version 3, little endian).
"""

import dataclasses
import mmap
import struct
from collections.abc import Iterator, Mapping

from strata_jax.errors import BadFileError

MetaValue = bool | int | float | str | tuple[bool | int | float | str, ...]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_SCALARS = {
    0: ("u8", struct.Struct("<B")),
    1: ("i8", struct.Struct("<b")),
    2: ("u16", struct.Struct("<H")),
    3: ("i16", struct.Struct("<h")),
    4: ("u32", struct.Struct("<I")),
    5: ("i32", struct.Struct("<i")),
    6: ("f32", struct.Struct("<f")),
    7: ("bool", struct.Struct("<B")),
    10: ("u64", struct.Struct("<Q")),
    11: ("i64", struct.Struct("<q")),
    12: ("f64", struct.Struct("<d")),
}
_STRING, _ARRAY = 8, 9

# Far above any real file (248,320 tokens, a 10 KiB template), low enough that a lie costs
# neither seconds nor memory: a sparse file can back any count with bytes.
MAX_HEADER_BYTES = 1 << 28
MAX_KEY_BYTES = 1 << 10
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 22
MAX_STRING_ITEMS = 1 << 22
"""Over all string arrays of a header together: each item is one step of a loop."""


class Cursor:
    """Reads a header front to back; no read leaves the file or the header limit."""

    def __init__(self, data: mmap.mmap | bytes, path: str):
        self.data = data
        self.path = path
        self.pos = 0
        self.end = min(len(data), MAX_HEADER_BYTES)
        self.string_items = 0

    def error(self, what: str, at: int | None = None) -> BadFileError:
        """Makes the error that names the file and the byte (default: the next one)."""
        return BadFileError(f"{self.path}: byte {self.pos if at is None else at}: {what}")

    def take(self, count: int, what: str) -> int:
        """Moves past `count` bytes and returns where they start."""
        start = self.pos
        if count > self.end - start:
            if self.end < len(self.data):
                raise self.error(f"the header goes on past {MAX_HEADER_BYTES} bytes, its limit")
            raise self.error(
                f"{what} needs {count} bytes, the file ends after {self.end - start}; "
                "it is cut off or damaged, fetch it again"
            )
        self.pos = start + count
        return start

    def u32(self, what: str) -> int:
        """Reads an unsigned 32-bit number."""
        return _U32.unpack_from(self.data, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        """Reads an unsigned 64-bit number."""
        return _U64.unpack_from(self.data, self.take(8, what))[0]

    def text(self, what: str, limit: int) -> str:
        """Reads a string of at most `limit` bytes."""
        at = self.pos
        count = self.u64(f"the length of {what}")
        if count > limit:
            raise self.error(f"{what} is {count} bytes long, at most {limit} expected", at)
        start = self.take(count, what)
        return _decode(self.data[start : start + count], what, self.path, start)

    def name(self, what: str, limit: int) -> str:
        """Reads a key or a tensor's name: as `text`, but never empty and fit to be printed."""
        at = self.pos
        text = self.text(what, limit)
        if not text or not text.isprintable():
            shown = text if len(text) <= 64 else text[:64] + "..."
            raise self.error(f"{what} is {shown!r}, a name in printable characters expected", at)
        return text

    def skip_strings(self, count: int, what: str) -> None:
        """Moves past `count` strings, looking at their lengths only."""
        data, pos, end, unpack = self.data, self.pos, self.end, _U64.unpack_from
        for item in range(count):
            if end - pos < 8 or (length := unpack(data, pos)[0]) > end - pos - 8:
                self.pos = pos
                raise self.error(f"item {item} of {what} does not fit into the file")
            if length > MAX_STRING_BYTES:
                raise self.error(
                    f"item {item} of {what} is {length} bytes long, "
                    f"at most {MAX_STRING_BYTES} expected",
                    pos,
                )
            pos += 8 + length
        self.pos = pos


@dataclasses.dataclass(frozen=True)
class MetaEntry:
    """Where a metadata value lies and what the file says it is."""

    kind: str
    """u8 ... f64, bool or string: the value's type, or that of the array's items."""
    count: int | None
    """Items of an array, None for a single value."""
    start: int
    """First byte of the value (of the first item)."""
    end: int

    def __str__(self) -> str:
        return self.kind if self.count is None else f"{self.kind}[{self.count}]"


class Metadata(Mapping[str, MetaValue]):
    """The key-value pairs of one file. Values are decoded when asked for, and kept.

    Numbers come as int, float or bool, strings as str, arrays as tuples. Getting a value raises
    BadFileError if a string is not UTF-8 or a bool neither 0 nor 1.
    """

    def __init__(self, data: mmap.mmap | bytes, path: str, entries: dict[str, MetaEntry]):
        self._data = data
        self._path = path
        self._entries = entries
        self._values: dict[str, MetaValue] = {}

    def __getitem__(self, key: str) -> MetaValue:
        if key not in self._values:
            self._values[key] = self._decode(key, self._entries[key])
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def entry(self, key: str) -> MetaEntry:
        """Type and place of a value, without decoding it. KeyError if there is no such key."""
        return self._entries[key]

    def release(self) -> None:
        """Lets go of the file; values not decoded by now are gone."""
        self._data = b""

    def _decode(self, key: str, entry: MetaEntry) -> MetaValue:
        what = f"metadata {key}"
        assert len(self._data) >= entry.end, f"{what} was asked for after the file was closed"
        raw = bytes(self._data[entry.start : entry.end])
        if entry.kind == "string":
            items = _strings(raw, entry, what, self._path)
        else:
            items = _numbers(raw, entry, what, self._path)
        return items[0] if entry.count is None else items


def _numbers(raw: bytes, entry: MetaEntry, what: str, path: str) -> tuple[bool | int | float, ...]:
    code = next(item.format[1:] for kind, item in _SCALARS.values() if kind == entry.kind)
    size = struct.calcsize(code)
    values = struct.unpack(f"<{len(raw) // size}{code}", raw)
    if entry.kind != "bool":
        return values
    for index, value in enumerate(values):
        if value > 1:
            raise BadFileError(
                f"{path}: byte {entry.start + index}: {what} holds {value}, a bool is 0 or 1"
            )
    return tuple(value == 1 for value in values)


def _strings(raw: bytes, entry: MetaEntry, what: str, path: str) -> tuple[str, ...]:
    items, pos = [], 0
    while pos < len(raw):
        begin = pos + 8
        pos = begin + _U64.unpack_from(raw, pos)[0]
        items.append(_decode(raw[begin:pos], what, path, entry.start + begin))
    return tuple(items)


def _decode(raw: bytes, what: str, path: str, at: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadFileError(f"{path}: byte {at + error.start}: {what} is not valid UTF-8") from None


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Reads the directory of `count` key-value pairs and leaves the cursor behind them.

    Raises:
        BadFileError: for anything that does not fit into the file or the limits above, naming the
            byte and the key.
    """
    entries: dict[str, MetaEntry] = {}
    for index in range(count):
        at = cursor.pos
        key = cursor.name(f"key {index} of {count}", MAX_KEY_BYTES)
        if key in entries:
            raise cursor.error(f"key {key!r} is there twice", at)
        entries[key] = _read_entry(cursor, f"metadata {key}")
    return Metadata(cursor.data, cursor.path, entries)


def _read_entry(cursor: Cursor, what: str) -> MetaEntry:
    type_at = cursor.pos
    kind = cursor.u32(f"the type of {what}")
    if kind == _ARRAY:
        return _read_array(cursor, what)
    if kind == _STRING:
        start = cursor.pos
        cursor.text(what, MAX_STRING_BYTES)
        return MetaEntry("string", None, start, cursor.pos)
    name, layout = _scalar(cursor, kind, what, type_at)
    start = cursor.take(layout.size, what)
    return MetaEntry(name, None, start, cursor.pos)


def _read_array(cursor: Cursor, what: str) -> MetaEntry:
    type_at = cursor.pos
    kind = cursor.u32(f"the item type of {what}")
    count_at = cursor.pos
    count = cursor.u64(f"the length of {what}")
    if kind == _ARRAY:
        raise cursor.error(f"{what} is an array of arrays, which no key of a model is", type_at)
    if count > MAX_ARRAY_ITEMS:
        raise cursor.error(
            f"{what} has {count} items, at most {MAX_ARRAY_ITEMS} expected", count_at
        )
    start = cursor.pos
    if kind == _STRING:
        cursor.string_items += count
        if cursor.string_items > MAX_STRING_ITEMS:
            raise cursor.error(
                f"{what} brings the strings in arrays to {cursor.string_items}, "
                f"at most {MAX_STRING_ITEMS} expected",
                count_at,
            )
        cursor.skip_strings(count, what)
        return MetaEntry("string", count, start, cursor.pos)
    name, layout = _scalar(cursor, kind, what, type_at)
    cursor.take(count * layout.size, what)
    return MetaEntry(name, count, start, cursor.pos)


def _scalar(cursor: Cursor, kind: int, what: str, at: int) -> tuple[str, struct.Struct]:
    if kind not in _SCALARS:
        raise cursor.error(f"{what} has value type {kind}, 0 to 12 expected", at)
    return _SCALARS[kind]
