"""Whether the native library can be used here: one clear line instead of a loader's traceback.

XLA refuses handlers that were built with headers newer than its own, but only when its backend
starts, and in its own words. jaxlib carries its headers, so the comparison needs no backend.
"""

import importlib
import importlib.util
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from strata_jax.errors import StrataError

MODULE = "strata_jax._native"
_ADVICE = "build it here: tools/run"
_HEADER = Path("include", "xla", "ffi", "api", "c_api.h")
_VERSION = re.compile(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)$", re.MULTILINE)


def runtime_api_version() -> tuple[int, int] | None:
    """The FFI version of the jaxlib that would run the handlers; None if it cannot be told."""
    spec = importlib.util.find_spec("jaxlib")  # does not import it
    if spec is None or spec.origin is None:
        return None
    return read_api_version(Path(spec.origin).parent / _HEADER)


def read_api_version(header: Path) -> tuple[int, int] | None:
    """The version a `c_api.h` defines; None if there is none."""
    if not header.is_file():
        return None
    found = dict(_VERSION.findall(header.read_text(errors="replace")))
    return (int(found["MAJOR"]), int(found["MINOR"])) if len(found) == 2 else None


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
    built, runs = tuple(native.BUILT_API_VERSION), runtime()
    if runs is not None and (built[0] != runs[0] or built[1] > runs[1]):
        raise StrataError(
            f"{MODULE}: built with XLA FFI {built[0]}.{built[1]}, but the jaxlib here runs up to "
            f"{runs[0]}.{runs[1]}; {_ADVICE}"
        )
    return native
