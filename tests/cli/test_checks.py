from pathlib import Path

from strata_jax.cli import checks


def test_reads_the_features_of_the_cpu(tmp_path: Path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nflags\t\t: other\n")

    assert checks.cpu_features(file) == {"fpu", "avx2", "fma"}


def test_knows_no_features_where_the_kernel_lists_none(tmp_path: Path):
    assert checks.cpu_features(tmp_path / "none") == frozenset()


def test_names_a_library_that_is_there_twice(tmp_path: Path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 00000000 08:01 1    /a/libstdc++.so.6\n"
        "7f01-7f02 r-xp 00000000 08:01 1    /a/libstdc++.so.6\n"
        "7f02-7f03 r-xp 00000000 08:01 2    /b/libstdc++.so.6\n"
        "7f03-7f04 r-xp 00000000 08:01 3    /b/libm.so.6\n"
        "7f04-7f05 rw-p 00000000 00:00 0 [heap]\n"
    )

    assert checks.loaded_libraries(maps) == {
        "libstdc++.so.6": "/a/libstdc++.so.6, /b/libstdc++.so.6"
    }


def test_tells_of_the_tiers_of_the_device_that_is_taken():
    cpu, one, two = (checks._tiers(count) for count in (0, 1, 2))

    assert [name for name, tier in cpu.items() if tier["on"]] == ["host"]
    assert [name for name, tier in one.items() if tier["on"]] == ["primary", "stream", "host"]
    assert "emulate" not in str(one)
    assert "no second GPU" in one["peer"]["why"]
    assert "another of the 2 GPUs" in two["peer"]["why"]
