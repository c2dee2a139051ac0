"""What a plan may use of a machine."""

import dataclasses

from strata_jax.weights.budget import HostMemory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What the plan may use."""

    platform: str
    """cpu or cuda. On the CPU devices are emulated in RAM and have the memory that flags give."""
    host: HostMemory
    primary_free_bytes: int | None = None
    """Of the GPU; None on the CPU."""
    peer_free_bytes: int | None = None
    peer_is_reached: bool = False
    """Whether the primary's kernels read the peer's memory."""
    num_devices: int = 1
    """GPUs that are visible."""
    runtime_bytes: int = 0
    """Of the primary, that no allocation of ours accounts for (`budget.CUDA_RUNTIME_BYTES`)."""
