"""What becomes of a window on a device, against the same told one step after the other."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.engine.follow_programs import (
    Orders,
    OrderSender,
    find,
    next_window,
    report_of,
    stop_mask,
)
from strata_jax.engine.programs import Numbers

ROWS, VOCAB, POS = 8, 5, 20


@jax.jit
def follow(logits, drawn, packed, stops, orders, drafts, made):
    found = find(logits, drawn, packed, stops, Orders(*orders))
    return next_window(found, drafts, made), report_of(found, packed)


def expected(ids, live, after, stops, last):
    """Ids that are kept, and whether the answer ends, by the rules of one id a window."""
    kept = []
    for row in range(live):
        kept.append(after[row])
        ended = after[row] in stops or after[row] < 0 or POS + row + 1 >= last
        if ended:
            return kept, True
        if row + 1 >= live or ids[row + 1] != after[row]:
            return kept, False
    return kept, True


IDS = st.lists(st.integers(0, VOCAB - 1), min_size=ROWS, max_size=ROWS)


@settings(deadline=None, max_examples=60)
@given(
    ids=IDS,
    live=st.integers(0, ROWS),
    agree=st.integers(0, ROWS),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=2),
    room=st.integers(0, 12),
    bad=st.none() | st.integers(0, ROWS - 1),
    drawn=st.booleans(),
    made=st.integers(0, 7),
)
def test_a_window_is_judged_as_ids_one_by_one(ids, live, agree, stops, room, bad, drawn, made):
    room += live  # rows past the last id are never queued
    after = [*ids[1:], 0]
    after[agree:] = [(token + 1) % VOCAB for token in after[agree:]]
    if bad is not None:
        after[bad] = -1
    kept, ended = expected(ids, live, after, stops, POS + room)
    packed = [*ids, *Numbers(pos=POS, live=live, head_rows=live, kept=1, certain=min(live, 1))]
    logits = np.full((ROWS, VOCAB + 1), -1.0, np.float32)
    logits[:, VOCAB] = 9  # no id: may not win
    for row, token in enumerate(after):
        logits[row, token] = np.nan if token < 0 else 1
    given_ids = after if drawn else [3] * ROWS
    orders = Orders(wanted=7, last=POS + room, drawn=drawn)
    drafts = np.arange(7) % VOCAB

    following, report = follow(
        jnp.asarray(logits) if not drawn else jnp.zeros_like(logits),
        np.asarray(given_ids, np.int32),
        np.asarray(packed, np.int32),
        stop_mask(frozenset(stops), VOCAB),
        np.asarray(orders, np.int32),
        drafts.astype(np.int32),
        np.int32(made),
    )

    assert report.tolist()[: 2 + len(kept)] == [live, len(kept), *kept]
    numbers = Numbers(*following[ROWS:].tolist())
    rows = 0 if ended else min(1 + made, POS + room - (POS + len(kept)))
    assert numbers == Numbers(
        pos=POS + len(kept),
        live=rows,
        head_rows=rows,
        kept=max(len(kept) - 1, 0),
        certain=min(rows, 1),
    )
    if rows:
        assert following[:rows].tolist() == [kept[-1], *drafts[: rows - 1]]
    assert following[rows:ROWS].tolist() == [0] * (ROWS - rows)


def test_only_ids_that_may_be_drawn_stop():
    assert stop_mask(frozenset({1, 7, -3}), 4).tolist() == [False, True, False, False]


def test_orders_are_sent_when_they_change():
    sender = OrderSender(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    first = sender.send(Orders(wanted=3, last=9))

    others = [sender.send(Orders(wanted=wanted, last=9)) for wanted in range(100)]

    assert sender.send(Orders(wanted=99, last=9)) is others[-1]
    assert first.tolist() == others[3].tolist() == [3, 9, 0, 0]
