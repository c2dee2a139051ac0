"""Ops with marks: every op of a tile has one, under a name that is known."""

import dataclasses

from strata_jax.ops.sets import OpSet
from strata_jax.ops.timed import _BY_OP, _BY_ROLE, PHASES


def test_every_op_of_a_tile_is_marked_or_marks_itself():
    ops = {field.name for field in dataclasses.fields(OpSet)}

    assert ops - set(_BY_OP) == {"quant_matmul", "expert_ffn", "gdn_window", "router_topk"}


def test_every_phase_has_a_number():
    marked_by_itself = {phase for phase in PHASES if phase.startswith("experts: ")}

    assert set(_BY_OP.values()) | set(_BY_ROLE.values()) | marked_by_itself == set(PHASES)
