"""The native library: loads it, registers its XLA targets once, names them for `ffi_call`."""

import functools

import jax

from strata_jax import _native


@functools.cache
def _register() -> None:
    for op, handler in _native.targets().items():
        jax.ffi.register_ffi_target(_target_name(op), handler, platform="cpu")


def _target_name(op: str) -> str:
    # XLA's persistent cache does not see our library, so the library's version is in the name.
    return f"strata.{op}.v{_native.TARGET_VERSION}"


def target(op: str) -> str:
    """The XLA target of `op`, registered on first use."""
    _register()
    return _target_name(op)
