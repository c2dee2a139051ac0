"""Whether the native library can be used here: one clear line instead of a loader's traceback."""

import importlib
import platform
import sys
from collections.abc import Callable
from types import ModuleType

from strata_jax.errors import StrataError
from strata_jax.ops.ffi_version import check_built_version, runtime_api_version

MODULE = "strata_jax._native"
_ADVICE = "build it here: tools/run"


def load_native(
    load: Callable[[str], ModuleType] = importlib.import_module,
    runtime: Callable[[], tuple[int, int] | None] = runtime_api_version,
) -> ModuleType:
    """The native library.

    Raises:
        StrataError: if it is missing, built for another machine or Python, or too new for jaxlib.
    """
    here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.machine()}"
    try:
        native = load(MODULE)
    except ModuleNotFoundError as error:
        raise StrataError(f"{MODULE}: not built for {here} ({error}); {_ADVICE}") from None
    except ImportError as error:
        raise StrataError(f"{MODULE}: cannot be loaded by {here}: {error}; {_ADVICE}") from None
    check_built_version(native.BUILT_API_VERSION, runtime())
    return native
