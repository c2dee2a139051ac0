import jax
import numpy as np
import pytest

from strata_jax.engine.loader import primary_sharding
from strata_jax.engine.places import small_places


def test_keeps_what_lies_between():
    kept = small_places(primary_sharding("cpu"))

    assert len({array.unsafe_buffer_pointer() for array in kept}) == len(kept) > 32


@pytest.mark.gpu
def test_a_large_array_lies_where_it_lay_whatever_small_ones_there_are():
    sharding = primary_sharding("cuda")
    between = small_places(sharding)

    def place(count: int) -> int:
        small = [jax.device_put(np.int32(n), sharding) for n in range(count)]
        large = jax.device_put(np.zeros(1 << 20), sharding)
        jax.block_until_ready((small, large))
        return large.unsafe_buffer_pointer()

    assert len({place(count) for count in (0, 1, 2, 3, 17)}) == 1
    assert between
