"""The native libraries: loaded and registered with XLA once, and how an op calls them."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _native
from strata_jax.config import Platform
from strata_jax.ops.ffi_version import check_built_version, runtime_api_version


@dataclasses.dataclass(frozen=True)
class Backend:
    """Whose kernels run the ops: one op has one name in all of them."""

    name: Literal["cpu", "cuda", "emulated"]
    """`emulated`: the CUDA kernels, run on the CPU for tests."""

    @property
    def library(self) -> ModuleType:
        """The library of the backend, loaded on first use.

        Raises:
            ImportError: if this build has none.
        """
        names = {"cpu": "_native", "cuda": "_native_cuda", "emulated": "_native_emulated"}
        return importlib.import_module(f"strata_jax.{names[self.name]}")

    @property
    def platform(self) -> Platform:
        """JAX's platform that runs the programs."""
        return "cuda" if self.name == "cuda" else "cpu"

    @property
    def is_device(self) -> bool:
        """Whether weights lie in a `DeviceStore` and ops take a workspace."""
        return self.name != "cpu"

    def target(self, op: str) -> str:
        """The XLA target of `op`, registered on first use.

        Raises:
            StrataError: if the library was built with headers newer than the jaxlib here.
        """
        _register(self)
        return _target_name(self, op)

    def workspace(self, op: str, *sizes: Any) -> int:
        """Bytes of scratch memory that the device's kernels want from XLA; 0 on the CPU.

        Args:
            op: name of the op.
            sizes: arguments of the library's function `<op>_workspace`.
        """
        return getattr(self.library, f"{op}_workspace")(*sizes) if self.is_device else 0

    def call(
        self,
        op: str,
        out: Sequence[jax.ShapeDtypeStruct],
        *,
        workspace: int = 0,
        aliases: Mapping[int, int] | None = None,
    ) -> Callable[..., Sequence[jax.Array]]:
        """The op as a function of its operands and attributes, giving the results `out`.

        Scratch memory is one more result, which is dropped here: so XLA plans it with everything else,
        and its address stays the same from step to step.
        """
        results = list(out)
        if self.is_device and workspace:
            results.append(jax.ShapeDtypeStruct((workspace,), jnp.uint8))
        run = jax.ffi.ffi_call(self.target(op), results, input_output_aliases=dict(aliases or {}))
        return lambda *operands, **attributes: run(*operands, **attributes)[: len(out)]


CPU = Backend("cpu")


@functools.cache
def _register(backend: Backend) -> None:
    # XLA refuses handlers that are too new for the whole process: a later answer helps nobody.
    check_built_version(_native.BUILT_API_VERSION, runtime_api_version())
    platform = "CUDA" if backend.name == "cuda" else "cpu"
    for op, handler in backend.library.targets().items():
        jax.ffi.register_ffi_target(_target_name(backend, op), handler, platform=platform)


def _target_name(backend: Backend, op: str) -> str:
    # XLA's persistent cache does not see our library, so the library's version is in the name.
    emulated = ".emulated" if backend.name == "emulated" else ""
    return f"strata.{op}.v{_native.TARGET_VERSION}{emulated}"


def int64s(values: Sequence[int]) -> np.ndarray:
    """An attribute of several integers."""
    return np.asarray(values, np.int64)
