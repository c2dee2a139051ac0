"""The native library: loads it, registers its XLA targets once, names them for `ffi_call`."""

import functools

import jax

from strata_jax import _native
from strata_jax.ops.ffi_version import check_built_version, runtime_api_version


@functools.cache
def _register() -> None:
    # XLA refuses handlers that are too new for the whole process: a later answer helps nobody.
    check_built_version(_native.BUILT_API_VERSION, runtime_api_version())
    for op, handler in _native.targets().items():
        jax.ffi.register_ffi_target(_target_name(op), handler, platform="cpu")


def _target_name(op: str) -> str:
    # XLA's persistent cache does not see our library, so the library's version is in the name.
    return f"strata.{op}.v{_native.TARGET_VERSION}"


def target(op: str) -> str:
    """The XLA target of `op`, registered on first use.

    Raises:
        StrataError: if the library was built with headers newer than the jaxlib here.
    """
    _register()
    return _target_name(op)
