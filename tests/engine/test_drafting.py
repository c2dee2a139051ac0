"""Who drafts for a window, and what is counted."""

import jax.numpy as jnp
import numpy as np

from strata_jax.engine.draft_length import DraftLength
from strata_jax.engine.drafting import Drafting, Source
from strata_jax.engine.drafts import Drafted


class FakeDrafter:
    """Drafts the same ids again and again."""

    def __init__(self, ids, probabilities=None):
        self.ids = np.asarray(ids, np.int32)
        self.probabilities = np.ones(len(ids)) if probabilities is None else probabilities
        self.told = []

    def reset(self):
        self.told = []

    def read(self, ids, residual, position):
        self.told.append((position, ids.tolist()))

    def draft(self, count):
        probabilities = np.asarray(self.probabilities, np.float32)[:count]
        return Drafted(ids=self.ids[:count], probabilities=probabilities)


def drafting(*drafters, most=3, min_p=0.0, length=False):
    sources = [
        Source(name=str(i), drafter=d, length=DraftLength(most) if length else None)
        for i, d in enumerate(drafters)
    ]
    made = Drafting(sources, most, min_p)
    made.reset()
    return made


def test_drafts_as_many_as_there_is_room_for():
    made = drafting(FakeDrafter([1, 2, 3, 4, 5]))

    assert made.next(9).tolist() == [1, 2, 3]
    assert made.next(2).tolist() == [1, 2]
    assert made.next(0).tolist() == []


def test_an_improbable_draft_ends_them():
    made = drafting(FakeDrafter([1, 2, 3], [0.9, 0.4, 0.95]), min_p=0.5)

    assert made.next(3).tolist() == [1]


def test_the_next_drafter_is_asked_where_one_has_nothing():
    assert drafting(FakeDrafter([]), FakeDrafter([7])).next(3).tolist() == [7]


def test_all_drafters_hear_what_was_read():
    drafters = [FakeDrafter([1]), FakeDrafter([2])]

    drafting(*drafters).read(np.asarray([5, 6]), jnp.zeros(0), 3)

    assert [each.told for each in drafters] == [[(3, [5, 6])]] * 2


def test_the_drafter_that_promises_more_is_asked_first():
    good, bad = FakeDrafter([1, 1, 1]), FakeDrafter([2, 2, 2])
    made = drafting(bad, good, length=True)
    made.next(3)
    made.seen(0, 0, 1.0)

    found = []
    for _ in range(60):
        drafts = made.next(3)
        found += drafts[:1].tolist()
        made.seen(len(drafts), len(drafts) if 1 in drafts else 0, 1 + 0.2 * len(drafts))

    assert found[-10:] == [1] * 10


def test_counts_what_became_of_drafts():
    made = drafting(FakeDrafter([1, 2, 3]))
    for came_true in (3, 0, 1):
        made.next(3)
        made.seen(3, came_true, 1.0)
    made.seen(0, 0, 1.0)

    assert made.counts.to_json() == {
        "drafted": 9,
        "accepted": 4,
        "acceptance": 4 / 9,
        "steps": [
            {"looked_at": 3, "accepted": 2, "rate": 2 / 3},
            {"looked_at": 2, "accepted": 1, "rate": 0.5},
            {"looked_at": 1, "accepted": 1, "rate": 1.0},
        ],
        "given_up": 0,
        "passes": 4,
        "tokens_per_pass": 2.0,
    }


def test_a_request_begins_with_nothing_counted():
    made = drafting(FakeDrafter([1]))
    made.next(1)
    made.seen(1, 1, 1.0)

    made.reset()

    assert made.counts.to_json()["tokens_per_pass"] is None
    assert made.counts.to_json()["acceptance"] is None


def test_pauses_are_told_and_counted():
    made = drafting(FakeDrafter([1, 1, 1]), length=True)
    for _ in range(38):
        drafts = made.next(3)
        made.seen(len(drafts), 0, 1 + 0.5 * len(drafts))

    assert made.counts.given_up >= 1
    assert made.next(3).tolist() == []
