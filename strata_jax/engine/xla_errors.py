"""What XLA throws, in a sentence: what it asked for, what the plan said, what helps."""

import re

from strata_jax.errors import CapacityError, StrataError
from strata_jax.weights.budget import shown
from strata_jax.weights.tier_needs import TierPlan

_NO_MEMORY = "RESOURCE_EXHAUSTED"
_ASKED = re.compile(r"allocat\w* ([\d.]+) ?(\w+)")
_NESTED = "Error dispatching computation: "


def in_a_sentence(error: BaseException, plan: TierPlan) -> StrataError:
    """The error to raise for a JaxRuntimeError.

    Args:
        error: of loading, compiling or a step.
        plan: what was thought to fit.

    Returns:
        CapacityError where memory ended (XLA's or the device's), else StrataError.
    """
    first = str(error).partition("\n")[0].replace(_NESTED, "")
    if _NO_MEMORY not in first:
        return StrataError(
            f"XLA: a program failed ({first}), none should; the next request begins anew, and "
            "'strata-jax doctor' tells whether this machine is sound"
        )
    asked = _ASKED.search(first)
    planned = [f"{need.name} {_needs(need.need_bytes, need.have_bytes)}" for need in plan.needs]
    return CapacityError(
        f"XLA: {'more' if asked is None else _size(*asked.groups())} asked for and not to be had; the "
        f"plan said {', '.join(planned)}, of the primary {shown(plan.xla_bytes)} for XLA; a smaller "
        "--max_context, --prefill=1 or --kv=int8 takes less"
    )


def _size(number: str, unit: str) -> str:
    is_bytes = unit.startswith("byte") and number.isdecimal()
    return shown(int(number)) if is_bytes else f"{number} {unit}"


def _needs(need: int, have: int | None) -> str:
    return shown(need) if have is None else f"{shown(need)} of {shown(have)}"
