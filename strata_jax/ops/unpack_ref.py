"""GGUF rows to the common form of contract T in numpy: the specification of the native unpackers.

Every quantised type becomes int8 codes w, float32 scales per block of 32 values and, for some types,
integer factors per 16. A value is w * D, w * k * D, w * D + n * M or w * k * D + n * M. The native
side (`ffi/common/unpack.h`) gives the same bits. The types themselves are in `unpack_layouts_ref`.
"""

import numpy as np

from strata_jax.ops.unpack_layouts_ref import LAYOUTS, TypeLayout, UnpackedRows

_BLOCK = 32
_GROUP = 16


def unpack_rows_ref(
    type_id: int, data: bytes | np.ndarray, num_rows: int, num_cols: int
) -> UnpackedRows:
    """Decodes rows of a quantised type.

    Args:
        type_id: ggml type id.
        data: the rows' bytes, one row after the other.
        num_rows: R.
        num_cols: values in a row, a multiple of the type's block.

    Raises:
        ValueError: for a type that is unknown or not quantised, columns that do not fill whole
            blocks, or a wrong number of bytes.
    """
    layout = layout_of(type_id)
    if layout.decode is None:
        raise ValueError(f"unpack_rows_ref: type {layout.name}, expected a quantised type")
    raw = _checked_bytes(layout, data, num_rows, num_cols)
    with np.errstate(all="ignore"):
        blocks = layout.decode(raw.reshape(-1, layout.block_bytes))

    def as_rows(values: np.ndarray) -> np.ndarray:
        per_row = num_cols // layout.block_values * values.shape[1]
        return np.ascontiguousarray(values).reshape(num_rows, per_row)

    return UnpackedRows(
        codes=as_rows(blocks.codes),
        d=as_rows(blocks.d),
        m=None if blocks.m is None else as_rows(blocks.m),
        k=None if blocks.k is None else as_rows(blocks.k),
        n=None if blocks.n is None else as_rows(blocks.n),
    )


def dequantize_ref(
    type_id: int, data: bytes | np.ndarray, num_rows: int, num_cols: int
) -> np.ndarray:
    """Returns the values of GGUF rows as float32 [R, C].

    Arguments and errors as `unpack_rows_ref`; F32, F16 and BF16 are read too. A value is
    (w * k) * D, plus n * M where there is a minimum, each step rounded once.
    """
    layout = layout_of(type_id)
    if layout.decode is None:
        raw = _checked_bytes(layout, data, num_rows, num_cols)
        return _read_floats(layout.name, raw).reshape(num_rows, num_cols)
    rows = unpack_rows_ref(type_id, data, num_rows, num_cols)
    w = rows.codes.astype(np.float32)
    with np.errstate(all="ignore"):
        if rows.k is not None:
            w = w * np.repeat(rows.k, _GROUP, axis=1)
        values = w * np.repeat(rows.d, _BLOCK, axis=1)
        if rows.m is not None:
            minimum = np.repeat(rows.m, _BLOCK, axis=1)
            if rows.n is not None:
                minimum = minimum * np.repeat(rows.n, _GROUP, axis=1)
            values = values + minimum
    return values


def layout_of(type_id: int) -> TypeLayout:
    """Returns the layout of a ggml type id.

    Raises:
        ValueError: for an id that this project does not compute with.
    """
    if type_id not in LAYOUTS:
        raise ValueError(f"layout_of: ggml type {type_id}, expected one of {sorted(LAYOUTS)}")
    return LAYOUTS[type_id]


def _checked_bytes(
    layout: TypeLayout, data: bytes | np.ndarray, num_rows: int, num_cols: int
) -> np.ndarray:
    """Returns `data` as a flat uint8 array after comparing its size with the shape."""
    if num_cols % layout.block_values:
        raise ValueError(
            f"{layout.name}: rows of {num_cols} values, expected a multiple of"
            f" {layout.block_values}"
        )
    flat = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    flat = np.ascontiguousarray(flat).view(np.uint8).reshape(-1)
    expected = num_rows * num_cols // layout.block_values * layout.block_bytes
    if flat.size != expected:
        raise ValueError(
            f"{layout.name}: {flat.size} bytes for {num_rows} rows of {num_cols} values,"
            f" expected {expected}"
        )
    return flat


def _read_floats(name: str, raw: np.ndarray) -> np.ndarray:
    """Bytes of F32, F16 or BF16 to float32, exactly."""
    if name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view("<f4" if name == "F32" else "<f2").astype(np.float32)
