"""The sides of the gate `drafts`: one id a window, and windows with drafts of which many or few come true.

Scripted drafts know the reference's answers and spoil a part of them, so that every acceptance is had
whatever the model. `judge.py` writes the answers once the reference has given them.
"""

from strata_jax.gate.comparison import DraftsSeen, LiveRows, Side

ANSWERS = "{answers}"
"""In a flag's value: the file with the reference's answers."""
VARIED = frozenset({"spec", "draft_script", "suffix_draft"})
_SCRIPTED = ((2, 0), (3, 50), (4, 100), (5, 0), (6, 85), (7, 50), (8, 100), (8, 85))
"""Live rows, and the percentage of drafts that are right."""
_WITHOUT_LOGITS = ((5, 0), (4, 100), (8, 50))
"""Likewise where the logits are not asked for."""

_ACCEPTED = DraftsSeen("accepted")
_REJECTED = DraftsSeen("rejected")
_NONE_ACCEPTED = DraftsSeen("accepted", "== 0")
_NONE_REJECTED = DraftsSeen("rejected", "== 0")


def draft_sides(flags: dict[str, str]) -> tuple[Side, ...]:
    """All sides, with `flags` in common."""
    common = flags | {"window_rows": "8"}
    return (
        Side(name="none", flags=common | {"spec": "1"}, claims=(LiveRows(1),)),
        *(scripted(common, rows, percent) for rows, percent in _SCRIPTED),
        # Whether a text repeats itself is the model's affair, so nothing is claimed of these.
        Side(
            name="looked up",
            flags=common | {"spec": "4", "suffix_draft": "1"},
            claims=(LiveRows(4),),
        ),
    )


def ids_sides(flags: dict[str, str]) -> tuple[Side, ...]:
    """Sides whose ids are enough: on a GPU their windows follow one another without the host."""
    common = flags | {"window_rows": "8"}
    return (
        Side(name="none", flags=common | {"spec": "1"}, claims=(LiveRows(1),)),
        *(scripted(common, rows, percent) for rows, percent in _WITHOUT_LOGITS),
    )


def scripted(common: dict[str, str], rows: int, percent: int) -> Side:
    """With `percent` right, of rows - 1 drafts."""
    claims = {0: (_NONE_ACCEPTED, _REJECTED), 100: (_ACCEPTED, _NONE_REJECTED)}
    return Side(
        name=f"{rows} live rows, {percent} % right",
        flags=common | {"spec": str(rows), "draft_script": f"{percent}:{ANSWERS}"},
        claims=(LiveRows(rows), *claims.get(percent, (_ACCEPTED, _REJECTED))),
    )
