"""Tensor names: the block a name belongs to, and many names in few words."""

import re
from collections.abc import Iterable

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")


def split_block(name: str) -> tuple[int, str] | None:
    """Block number and the rest of a name like blk.3.attn_q.weight; None for any other."""
    match = _BLOCK.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def name_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups names that differ in the block number only.

    Returns:
        From a short form, blk.{0-1,3}.x, to the names it stands for, in order of first appearance.
    """
    members: dict[tuple[bool, str], dict[int, str]] = {}
    for name in names:
        split = split_block(name)
        block, key = (0, (False, name)) if split is None else (split[0], (True, split[1]))
        members.setdefault(key, {})[block] = name
    return {
        f"blk.{_ranges(sorted(found))}.{rest}" if in_block else rest: list(found.values())
        for (in_block, rest), found in members.items()
    }


def short_list(names: Iterable[str], most: int = 12) -> str:
    """One line that names them all, or the first `most` groups and how many are left."""
    groups = list(name_groups(names))
    rest = len(groups) - most
    return ", ".join(groups[:most]) + (f" and {rest} more" if rest > 0 else "")


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) + "}"
