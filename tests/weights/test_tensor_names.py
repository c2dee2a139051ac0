import pytest

from strata_jax.weights.tensor_names import name_groups, short_list, split_block


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("blk.0.ssm_a", (0, "ssm_a")),
        ("blk.47.attn_q.weight", (47, "attn_q.weight")),
        ("blk.047.attn_q.weight", None),
        ("blk.1234567.x", None),
        ("blk.-1.x", None),
        ("blk.²." + "x", None),
        ("blk.3.", None),
        ("output.weight", None),
        ("xblk.0.y", None),
    ],
)
def test_splits_block_names_only(name, split):
    assert split_block(name) == split


def test_groups_names_that_differ_in_the_block():
    names = ["out", "blk.0.a", "blk.1.a", "blk.0.b", "blk.3.a", "blk.*.a", "a"]

    assert name_groups(names) == {
        "out": ["out"],
        "blk.{0-1,3}.a": ["blk.0.a", "blk.1.a", "blk.3.a"],
        "blk.0.b": ["blk.0.b"],
        "blk.*.a": ["blk.*.a"],
        "a": ["a"],
    }


def test_lists_a_few_and_counts_the_rest():
    names = [f"n{index}" for index in range(5)]

    assert short_list(names) == "n0, n1, n2, n3, n4"
    assert short_list(names, 2) == "n0, n1 and 3 more"
