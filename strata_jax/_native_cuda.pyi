"""Types of the CUDA library (`ffi/cuda/module_cuda.cc`); not built everywhere."""

from typing import TypedDict

class CudaDevice(TypedDict):
    index: int
    name: str
    capability: str
    """Such as "9.0"."""
    pci_id: str
    total_mib: int
    free_mib: int
    problem: str | None
    """Why kernels of this build cannot run there; None if they can."""
    peers: list[int]
    """Devices whose memory its kernels reach."""

class CudaMachine(TypedDict):
    driver: str | None
    """Newest CUDA the driver runs; None without a driver."""
    runtime: str
    """CUDA this library was built with."""
    problem: str | None
    """Why there is no device; None if there is one."""
    devices: list[CudaDevice]

def machine() -> CudaMachine: ...
def built_archs() -> list[str]: ...
