"""Types of the native library (`ffi/module.cc`)."""

from typing_extensions import Buffer
from typing import Any

import numpy as np

TARGET_VERSION: str
BUILT_API_VERSION: tuple[int, int]

def targets() -> dict[str, Any]: ...
def set_threads(num_threads: int) -> None: ...
def num_threads() -> int: ...
def kernels() -> str: ...
def cpu_runs(name: str) -> bool: ...
def select_kernels(name: str) -> bool: ...
def unpack_rows(
    type: int, data: Buffer, num_rows: int, num_cols: int, isa: str
) -> dict[str, np.ndarray]: ...

class WeightStore:
    def __init__(self, num_roles: int, num_layers: int) -> None: ...
    @property
    def slot(self) -> int: ...
    def put(
        self,
        role: int,
        layer: int,
        type: int,
        count: int,
        rows: int,
        cols: int,
        stride: int,
        address: int,
        num_bytes: int,
    ) -> None: ...
    def close(self) -> None: ...
