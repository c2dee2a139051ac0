import gguf
import pytest

from strata_jax.weights.gguf_types import LAYOUTS, SUPPORTED, GgmlType, explain_type


def test_sizes_equal_those_of_the_gguf_package():
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}

    ours = {int(kind): (each.block_elems, each.block_bytes) for kind, each in LAYOUTS.items()}

    assert ours.pop(GgmlType.Q2_0) == (64, 18)  # not in the package
    assert ours == {kind: theirs[kind] for kind in ours}


def test_names_equal_those_of_the_gguf_package():
    theirs = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}

    assert all(theirs[kind] == kind.name for kind in GgmlType if kind is not GgmlType.Q2_0)


def test_supports_every_type_with_arithmetic():
    assert len(SUPPORTED) == 25
    assert GgmlType.I32 not in SUPPORTED
    assert LAYOUTS[GgmlType.IQ4_NL].bits == 4.5


@pytest.mark.parametrize(
    ("type_id", "parts"),
    [
        (40, ("NVFP4", "MXFP4")),
        (35, ("TQ2_0", "IQ2_XXS")),
        (9, ("Q8_1", "Q8_0")),
        (31, ("Q4_0_4_4", "Q4_0")),
        (43, ("43", "FP8", "BF16")),
        (4294967295, ("4294967295", "IQ3_S")),
    ],
)
def test_names_what_to_use_in_place_of_a_refused_type(type_id, parts):
    assert type_id not in LAYOUTS
    assert all(part in explain_type(type_id) for part in parts)
