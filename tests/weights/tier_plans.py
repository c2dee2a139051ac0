"""Plans of a small model's tiers, and what to read from them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from strata_jax.config import TierSettings
from strata_jax.errors import CapacityError
from strata_jax.weights.budget import GIB, HostMemory
from strata_jax.weights.pack import Pack
from strata_jax.weights.plan import make_plan
from strata_jax.weights.profile import Profile
from strata_jax.weights.tier_needs import Need, TierPlan
from strata_jax.weights.tier_plan import Machine, plan_tiers
from tests.gguf_maker import BLOCKY, make_model

HOST = HostMemory(total_bytes=64 * GIB, available_bytes=32 * GIB, lockable_bytes=None)
LAYERS, EXPERTS = BLOCKY.layers, BLOCKY.experts
ALL = LAYERS * EXPERTS
TYPES = {"*_exps*": 21, "blk.0.ffn_*_exps*": 0}
"""Experts of two sizes: gate and up rows of layer 0 are F32, all others IQ3_S."""


def make_pack_file(folder: Path) -> Path:
    """A model without weights."""
    return make_model(folder / "m.gguf", BLOCKY, types=TYPES, sparse=True).path


def planner(pack: Pack) -> Callable[..., TierPlan]:
    """Plans by settings, with keywords for the machine, the context and a profile."""
    plan = make_plan(pack, None)

    def made(
        host: HostMemory = HOST,
        platform: str = "cpu",
        context: int | None = None,
        profile: Profile | None = None,
        free: tuple[int | None, int | None] = (None, None),
        runtime: int = 0,
        **settings,
    ) -> TierPlan:
        machine = Machine(
            platform=platform,
            host=host,
            primary_free_bytes=free[0],
            peer_free_bytes=free[1],
            num_devices=2,
            runtime_bytes=runtime,
        )
        sizes = plan if context is None else make_plan(pack, context)
        return plan_tiers(pack, sizes, TierSettings(**settings), machine, profile=profile)

    return made


def need_of(tiers: TierPlan, name: str) -> Need:
    (need,) = [need for need in tiers.needs if need.name == name]
    return need


def fixed_bytes(tiers: TierPlan) -> int:
    """What the primary needs beside experts and reserve."""
    parts = need_of(tiers, "primary").parts
    return sum(size for name, size in parts.items() if name not in ("experts", "reserve"))


def problem_of(tiers: TierPlan) -> str:
    assert not tiers.fits
    with pytest.raises(CapacityError) as error:
        tiers.check()
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 3
    return str(error.value)


def advised(message: str, flag: str) -> int | float:
    found = re.search(rf"--{flag}=([0-9.]+)", message.partition(";")[2])
    assert found, message
    return float(found[1]) if "." in found[1] else int(found[1])
