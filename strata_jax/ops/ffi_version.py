"""Whether handlers that were built with some FFI headers run on the jaxlib that is here.

XLA refuses handlers built with headers newer than its own, but only when its backend starts, and in
its own words. jaxlib carries its headers, so the comparison needs no backend and imports nothing.

Source: jax-ffi.md, section 1 (API 0.3 in jaxlib 0.10.2, 0.4 in 0.11.2; old headers run on newer
runtimes, never the reverse).
"""

import importlib.util
import re
from pathlib import Path

from strata_jax.errors import StrataError

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


def check_built_version(built: tuple[int, int], runtime: tuple[int, int] | None) -> None:
    """Refuses a library built with headers newer than the runtime.

    Args:
        built: version of the headers it was built with.
        runtime: version of the jaxlib here; None leaves the answer to XLA.

    Raises:
        StrataError: if the handlers cannot run; says how to rebuild them.
    """
    if runtime is not None and (built[0] != runtime[0] or built[1] > runtime[1]):
        raise StrataError(
            f"strata_jax._native: built with XLA FFI {built[0]}.{built[1]}, but the jaxlib here runs "
            f"up to {runtime[0]}.{runtime[1]}; build it against this jaxlib: tools/run, or "
            "pip install --no-build-isolation ."
        )
