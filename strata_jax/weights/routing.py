"""Routing records: which experts each row was sent to, as a run of the engine wrote them down.

A text file of JSON objects, one a line. The first names the model:

    {"format": "strata-routing-1", "model": HASH, "layers": L, "experts": E}

Each further line holds some rows of one layer, in the order in which they ran; a row is the list of
its experts:

    {"layer": l, "ids": [[3, 17], [3, 5]]}

A process that is killed leaves a last line without its end, which is left out; everything else that
is not as above is refused.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, Any

import numpy as np

from strata_jax.errors import BadFileError
from strata_jax.weights.metadata import MAX_EXPERTS, MAX_LAYERS

FORMAT = "strata-routing-1"
_MAX_LINE = 1 << 26
"""Characters; a tile of 2,048 rows and 10 experts has 100 thousand."""


@dataclasses.dataclass(frozen=True)
class RoutedModel:
    """The model that routing records or a profile are about."""

    hash: str
    """Content of its files (`Pack.file_hash`)."""
    layers: int
    """Trunk layers."""
    experts: int
    """Experts of a layer."""

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.experts} experts, {self.hash[:12]}"


class RoutingWriter:
    """Appends the records of one run to a new file. A context manager."""

    def __init__(self, path: pathlib.Path, model: RoutedModel) -> None:
        """Creates the file, or empties it. OSError if that cannot be done."""
        self._file: IO[str] = path.open("w", encoding="ascii")
        self._write({"format": FORMAT, **model_json(model)})

    def add(self, layer: int, ids: Sequence[Sequence[int]] | np.ndarray) -> None:
        """Writes rows of one layer: ids [T, A]."""
        rows = ids.tolist() if isinstance(ids, np.ndarray) else [list(row) for row in ids]
        self._write({"layer": layer, "ids": rows})

    def close(self) -> None:
        """Writes what is still in memory."""
        self._file.close()

    def __enter__(self) -> "RoutingWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


class RoutingReader:
    """Reads a file of records: iterate for (layer, ids) with ids int64 [T, A]."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads the first line.

        Raises:
            BadFileError: if the file cannot be read or does not begin as routing records do.
        """
        self.path = path
        self.is_cut = False
        """Whether the last line was left out, known after iterating."""
        with reading(path), path.open(encoding="utf-8") as file:
            first = file.readline(_MAX_LINE)
        if not first:
            raise BadFileError(f"{path}: is empty, routing records expected")
        record = parse_json(first)
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise BadFileError(f'{path}: line 1: "format": "{FORMAT}" expected')
        self.model = read_model(record, f"{path}: line 1")

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        with reading(self.path), self.path.open(encoding="utf-8") as file:
            file.readline(_MAX_LINE)
            number = 1
            while line := file.readline(_MAX_LINE):
                number += 1
                record = parse_json(line)
                if record is None and not line.endswith("\n") and len(line) < _MAX_LINE:
                    self.is_cut = True
                    return
                yield self._checked(record, number)

    def _checked(self, record: Any, number: int) -> tuple[int, np.ndarray]:
        where = f"{self.path}: line {number}"
        if not isinstance(record, dict) or not {"layer", "ids"} <= record.keys():
            raise BadFileError(f'{where}: {{"layer": l, "ids": [[...], ...]}} expected')
        layer = record["layer"]
        if not is_index(layer, self.model.layers):
            raise BadFileError(f"{where}: layer {layer!r}, 0 to {self.model.layers - 1} expected")
        return layer, self._rows(record["ids"], where)

    def _rows(self, ids: Any, where: str) -> np.ndarray:
        if not isinstance(ids, list) or not all(isinstance(row, list) for row in ids):
            raise BadFileError(f"{where}: ids is no list of rows")
        lengths = {len(row) for row in ids}
        if len(lengths) > 1:
            raise BadFileError(f"{where}: rows of {min(lengths)} and of {max(lengths)} experts")
        if any(type(expert) is not int for row in ids for expert in row):
            raise BadFileError(f"{where}: ids has something that is no whole number")
        try:
            rows = np.asarray(ids, np.int64).reshape(len(ids), sum(lengths))
        except OverflowError:
            rows = np.full((1, 1), -1)
        if rows.size and not 0 <= rows.min() <= rows.max() < self.model.experts:
            raise BadFileError(f"{where}: an expert is not from 0 to {self.model.experts - 1}")
        if (np.diff(np.sort(rows, axis=1), axis=1) == 0).any():
            raise BadFileError(f"{where}: a row names an expert twice")
        return rows


def count_routing(reader: RoutingReader) -> np.ndarray:
    """How often each expert was routed to: int64 [L, E].

    Raises:
        BadFileError: for records that are broken, with the line.
    """
    counts = np.zeros((reader.model.layers, reader.model.experts), np.int64)
    for layer, ids in reader:
        counts[layer] += np.bincount(ids.reshape(-1), minlength=reader.model.experts)
    return counts


def is_index(value: Any, count: int) -> bool:
    """Whether a JSON value is a whole number from 0 to `count` - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


def read_model(record: dict[str, Any], where: str) -> RoutedModel:
    """The model that a JSON object names in `model`, `layers` and `experts`.

    Raises:
        BadFileError: if it does not.
    """
    name = record.get("model")
    if not isinstance(name, str) or not name:
        raise BadFileError(f'{where}: "model" is {name!r}, the hash of a model expected')
    for key, most in (("layers", MAX_LAYERS), ("experts", MAX_EXPERTS)):
        if not is_index(record.get(key), most + 1) or record[key] < 1:
            raise BadFileError(
                f'{where}: "{key}" is {record.get(key)!r}, a whole number from 1 to {most} expected'
            )
    return RoutedModel(name, record["layers"], record["experts"])


def model_json(model: RoutedModel) -> dict[str, Any]:
    """What `read_model` reads."""
    return {"model": model.hash, "layers": model.layers, "experts": model.experts}


def parse_json(text: str) -> Any:
    """A JSON value, or None for what is none (JSON's null is of no use here either)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
    """Turns what goes wrong with reading a text file into a BadFileError."""
    if path.exists() and not path.is_file():  # a pipe could wait for ever
        raise BadFileError(f"{path}: is no file")
    try:
        yield
    except OSError as error:
        raise BadFileError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadFileError(f"{path}: is no text, JSON expected") from None
