from strata_jax.ops.roles import (
    DRAFT_TENSORS,
    EXPERT_ROLES,
    GLOBAL_TENSORS,
    LAYER_TENSORS,
    Role,
)


def test_numbers_roles_from_zero_without_gaps():
    assert [int(role) for role in Role] == list(range(len(Role)))


def test_keeps_the_numbers_that_compiled_programs_hold():
    # The compile cache keeps programs between runs: change these with the library's version only.
    kept = {
        "TOKEN_EMBD": 0,
        "NGRAM_TABLE": 4,
        "ATTN_QKV": 13,
        "FFN_ROUTER": 24,
        "FFN_DOWN_SHARED": 31,
        "EH_PROJ": 32,
    }
    assert {name: int(Role[name]) for name in kept} == kept


def test_names_a_tensor_for_every_role_once():
    names = [*GLOBAL_TENSORS.values(), *LAYER_TENSORS.values(), *DRAFT_TENSORS.values()]

    assert set(GLOBAL_TENSORS) | set(LAYER_TENSORS) | set(DRAFT_TENSORS) == set(Role)
    assert not set(GLOBAL_TENSORS) & set(LAYER_TENSORS)
    assert not set(DRAFT_TENSORS) & set(LAYER_TENSORS)
    assert len(set(names)) == len(names)


def test_takes_the_names_of_stacks_for_experts():
    assert {role for role, name in LAYER_TENSORS.items() if "_exps." in name} == EXPERT_ROLES
