"""Random but sane tensor bytes of every GGUF type: values around +-0.05, no NaN, no infinity."""

import numpy as np

_SIZES = {  # type id: values and bytes of a block
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
    40: (64, 36),
    41: (128, 18),
    42: (64, 18),
}
_SCALES = {  # type id: byte of the float16 scale and its size, byte of the minimum and its size
    2: (0, 1e-2, None, 0.0),
    3: (0, 1e-2, 2, -8e-2),
    6: (0, 5e-3, None, 0.0),
    7: (0, 5e-3, 2, -8e-2),
    8: (0, 6e-4, None, 0.0),
    10: (80, 5e-3, 82, 5e-3),
    11: (108, 1e-3, None, 0.0),
    12: (0, 2e-4, 2, 1.5e-3),
    13: (0, 1e-4, 2, 1.5e-3),
    14: (208, 5e-5, None, 0.0),
    16: (0, 1e-3, None, 0.0),
    17: (0, 1e-3, None, 0.0),
    18: (0, 1e-3, None, 0.0),
    19: (0, 6e-3, None, 0.0),
    20: (0, 8e-4, None, 0.0),
    21: (0, 6e-4, None, 0.0),
    22: (0, 1e-3, None, 0.0),
    23: (0, 4e-5, None, 0.0),
    41: (0, 5e-2, None, 0.0),
    42: (0, 5e-2, None, 0.0),
}


def block_elems(type_id: int) -> int:
    """Values of a block."""
    return _SIZES[type_id][0]


def block_bytes(type_id: int) -> int:
    """Bytes of a block."""
    return _SIZES[type_id][1]


def random_tensor(
    name: str, shape: tuple[int, ...], type_id: int, rng: np.random.Generator
) -> bytes:
    """Bytes of a tensor whose name says what values it should have; shape in ggml order."""
    count = int(np.prod(shape))
    if type_id not in (0, 1, 30):
        return _blocks(count // block_elems(type_id), type_id, rng)
    values = _values(name, count, rng)
    if type_id == 30:  # bfloat16, rounded half up
        return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).tobytes()
    return values.astype(np.float16 if type_id == 1 else np.float32).tobytes()


def _values(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(count, dtype=np.float32)
    if "norm" in name:
        return 1 + np.float32(0.1) * noise
    if name.endswith("ssm_a"):
        return -np.exp(noise)
    return np.float32(0.3 if "conv1d" in name else 0.08) * noise


def _blocks(count: int, type_id: int, rng: np.random.Generator) -> bytes:
    blocks = rng.integers(0, 256, (count, block_bytes(type_id)), np.uint8)
    spread = rng.uniform(0.5, 1.5, (count, 2))
    if type_id in _SCALES:
        at, size, minimum_at, minimum = _SCALES[type_id]
        blocks[:, at : at + 2] = _halves(size * spread[:, 0])
        if minimum_at is not None:
            blocks[:, minimum_at : minimum_at + 2] = _halves(minimum * spread[:, 1])
    elif type_id == 39:  # MXFP4: a power of two, 2^(byte - 127)
        blocks[:, 0] = rng.integers(119, 123, count)
    elif type_id == 29:  # IQ1_M: the scale's nibbles head the four 16-bit words at the end
        scale = _halves(6e-3 * spread[:, 0]).view(np.uint16)[:, 0]
        words = blocks[:, 48:56].copy().view(np.uint16) & 0x0FFF
        for index in range(4):
            words[:, index] |= (scale >> (4 * index) & 0xF) << 12
        blocks[:, 48:56] = words.view(np.uint8)
    return blocks.tobytes()


def _halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint8).reshape(-1, 2)
