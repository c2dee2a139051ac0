from typing import Any

from strata_jax.cli.answers import describe_late_copies, describe_tiers

MIB = 1 << 20
COUNTERS = {
    "shares": {"primary": 0.26, "peer": 0.19, "stream": 0.22, "host": 0.33, "file": 0.0},
    "swaps_primary": 28,
    "swaps_peer": 2,
    "bytes_swapped": 2 * MIB,
    "bytes_streamed": 9 * MIB,
    "bytes_read": 0,
}


def _line(**changes: Any) -> str | None:
    return describe_tiers({**COUNTERS, **changes})


def test_tells_the_shares_of_all_tiers_and_what_moved():
    """Reports 55 and 60: experts that are streamed are no hits, and what misses cost is shown."""
    assert _line() == (
        "experts: 26.0 % primary, 19.0 % peer, 22.0 % stream, 33.0 % host; 30 swaps (2.0 MiB), "
        "9.0 MiB streamed"
    )
    shares = {"primary": 0.5, "peer": 0.0, "stream": 0.0, "host": 0.0, "file": 0.5}
    assert _line(shares=shares, bytes_streamed=0, bytes_read=None) == (
        "experts: 50.0 % primary, 50.0 % file; 30 swaps (2.0 MiB)"
    )
    assert _line(shares=shares, bytes_streamed=0, bytes_read=3 * MIB) == (
        "experts: 50.0 % primary, 50.0 % file; 30 swaps (2.0 MiB), 3.0 MiB read from the file"
    )


def test_says_nothing_of_tiers_that_were_not_there():
    host = {"primary": 0.0, "peer": 0.0, "stream": 0.0, "host": 1.0, "file": 0.0}

    assert _line(shares=host) is None
    assert _line(shares=None) is None


def test_tells_of_experts_whose_copies_did_not_come():
    line = describe_late_copies({"experts_not_awaited": 12})

    assert line is not None
    assert line.startswith(
        "prompt: 12 experts did not arrive in their ring, for no copy ended for 2 s"
    )
    assert describe_late_copies({"experts_not_awaited": 0}) is None
    assert describe_late_copies(COUNTERS) is None
