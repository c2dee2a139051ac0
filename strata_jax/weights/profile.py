"""Profiles: rankings of a model's experts, hottest first, learned from use.

A profile is a JSON file:

    {"format": "strata-profile-1", "model": HASH, "layers": L, "experts": E, "ranked": [[l, e], ...]}

It ranks some or all experts of the trunk, none twice. Where two experts are as hot as each other the
lower layer comes first, then the lower expert, so that equal records give equal files.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from strata_jax.errors import BadFileError, UsageError
from strata_jax.weights.pack import Pack
from strata_jax.weights.routing import (
    RoutedModel,
    is_index,
    model_json,
    parse_json,
    read_model,
    reading,
)

FORMAT = "strata-profile-1"
_MAX_BYTES = 1 << 28
"""A ranking of 1024 layers with 16384 experts each fits."""

Pair = tuple[int, int]
"""(layer, expert)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A ranking of one model's experts."""

    model: RoutedModel
    ranked: tuple[Pair, ...]

    @classmethod
    def load(cls, path: pathlib.Path) -> "Profile":
        """Reads a profile.

        Raises:
            BadFileError: for a file that is missing, empty, cut off or no profile, and for one that
                ranks an expert twice or one that its model has not.
        """
        with reading(path):
            if path.stat().st_size > _MAX_BYTES:
                raise BadFileError(f"{path}: is too large for a profile")
            text = path.read_text(encoding="utf-8")
        if not text:
            raise BadFileError(f"{path}: is empty, a profile expected")
        record = parse_json(text)
        if record is None:
            raise BadFileError(f"{path}: is cut off or no JSON, a profile expected")
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise BadFileError(f'{path}: "format": "{FORMAT}" expected, a profile')
        model = read_model(record, str(path))
        return cls(model=model, ranked=_read_pairs(record.get("ranked"), model, path))

    def save(self, path: pathlib.Path) -> None:
        """Writes the file so that whatever happens the old or the new one is there, whole.

        A ranking of nothing is not written: it would be refused when it is read, and what is there is
        worth more. OSError if it cannot be written; the old file is then untouched.
        """
        if not self.ranked:
            return
        record = {"format": FORMAT, **model_json(self.model), "ranked": self.ranked}
        write_atomically(path, json.dumps(record, separators=(",", ":")) + "\n")

    def check_model(self, model: RoutedModel, path: pathlib.Path) -> None:
        """Refuses a profile of another model: BadFileError."""
        if self.model != model:
            raise BadFileError(
                f"{path}: is a profile of another model ({self.model}), one of this model "
                f"({model}) expected; 'strata-jax profile' makes one from its routing records"
            )


def routed_model(pack: Pack) -> RoutedModel:
    """What profiles and routing records of a model carry to be told from others'."""
    return RoutedModel(pack.file_hash(), pack.config.num_layers, pack.config.num_experts)


def load_profile(pack: Pack, path: pathlib.Path | None) -> Profile | None:
    """The profile of a file, checked to be this model's; None without a path.

    Raises:
        BadFileError: if it is no profile, or another model's.
    """
    if path is None:
        return None
    profile = Profile.load(path)
    profile.check_model(routed_model(pack), path)
    return profile


def check_replaceable(pack: Pack, path: pathlib.Path) -> None:
    """Refuses a place for this model's profile where something else would be lost.

    Raises:
        UsageError: if there is a file and it is no profile of this model.
    """
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return
    try:
        load_profile(pack, path)
    except BadFileError as error:
        raise UsageError(
            f"--expert_profile_save={path}: would be written over, but {error}; name another file"
        ) from None


def rank_counts(model: RoutedModel, counts: np.ndarray) -> Profile:
    """Ranks the experts that were used at all, the most used first.

    Args:
        model: whose experts.
        counts: how often each was used, [L, E], whole numbers or not.
    """
    return reorder(Profile(model=model, ranked=()), counts)


def reorder(profile: Profile, counts: np.ndarray) -> Profile:
    """Moves the experts that were used to the front, the most used first; the rest keep their order.

    Of experts used equally often that of the better old rank comes first, then by layer and expert.
    Experts that were used but not ranked are ranked now.

    Args:
        profile: the old ranking, complete or not.
        counts: how often each expert was used, [L, E].
    """
    E = profile.model.experts
    flat = counts.reshape(-1)
    old = np.asarray([layer * E + expert for layer, expert in profile.ranked], np.int64)
    rank = np.full(flat.size, flat.size, np.int64)
    rank[old] = np.arange(len(old))
    used = np.flatnonzero(flat > 0)
    front = used[np.lexsort((used, rank[used], -flat[used]))]
    back = old[flat[old] <= 0]
    return Profile(model=profile.model, ranked=_pairs(np.concatenate([front, back]), E))


def learned(
    model: RoutedModel, resident: np.ndarray, heat: np.ndarray, prior: Sequence[Pair]
) -> Profile:
    """Ranks what a run has learned: residents first, then by heat, then the prior ranking.

    Args:
        model: whose experts.
        resident: bool [L, E], experts that are on a device now.
        heat: how often each expert was used, [L, E], without decay.
        prior: the ranking the run began with.

    Source: reference-engine.md, section 2.8.
    """
    by_heat = reorder(Profile(model=model, ranked=tuple(prior)), heat)
    listed = set(by_heat.ranked)
    ranked = by_heat.ranked + tuple(
        pair for pair in _pairs(np.flatnonzero(resident), model.experts) if pair not in listed
    )
    first = tuple(pair for pair in ranked if resident[pair])
    return Profile(model=model, ranked=first + tuple(pair for pair in ranked if not resident[pair]))


def merge(profiles: Sequence[Profile], weights: Sequence[float]) -> Profile:
    """Ranks by the weighted sum of what each profile thinks an expert is worth.

    The expert of rank r (0 the first) is worth 1 / sqrt(r + 1), one without a rank nothing.

    Args:
        profiles: at least one.
        weights: as many, at least 0.

    Raises:
        UsageError: for profiles of different models, and for weights that do not fit.

    Source: reference-engine.md, section 2.6 (heat of a ranked pair).
    """
    if len(weights) != len(profiles) or any(not 0 <= weight < np.inf for weight in weights):
        raise UsageError(
            f"profile: {len(weights)} weights for {len(profiles)} profiles, one of at least 0 for "
            "each expected"
        )
    model = profiles[0].model
    for other in profiles:
        if other.model != model:
            raise UsageError(
                f"profile: profiles of different models ({model}; {other.model}) do not merge"
            )
    worth = np.zeros((model.layers, model.experts))
    for profile, weight in zip(profiles, weights):
        if profile.ranked:
            layers, experts = np.asarray(profile.ranked, np.int64).T
            worth[layers, experts] += weight / np.sqrt(np.arange(len(layers)) + 1.0)
    return rank_counts(model, worth)


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Replaces a file by a new one: killed at any moment, the old or the new one is there, whole.

    The new bytes go to a file beside it, to the disk, and then take its name. A device is written to: it
    must not become a file.
    """
    path = path.resolve()  # a link keeps pointing to the file
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new name must reach the disk, too
    try:
        with contextlib.suppress(OSError):  # not every file system does that for folders
            os.fsync(folder)
    finally:
        os.close(folder)


def _read_pairs(value: Any, model: RoutedModel, path: pathlib.Path) -> tuple[Pair, ...]:
    if not isinstance(value, list) or not value:
        raise BadFileError(f'{path}: "ranked" is no list of [layer, expert] pairs')
    pairs: dict[Pair, None] = {}
    for place, pair in enumerate(value):
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not (is_pair and is_index(pair[0], model.layers) and is_index(pair[1], model.experts)):
            raise BadFileError(
                f'{path}: "ranked"[{place}] is {str(pair)[:40]}, [layer, expert] below '
                f"[{model.layers}, {model.experts}] expected"
            )
        if tuple(pair) in pairs:
            raise BadFileError(f'{path}: "ranked"[{place}] is {pair} for the second time')
        pairs[pair[0], pair[1]] = None
    return tuple(pairs)


def _pairs(flat: np.ndarray, num_experts: int) -> tuple[Pair, ...]:
    return tuple((int(i) // num_experts, int(i) % num_experts) for i in flat.tolist())
