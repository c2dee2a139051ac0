"""Broken files end in BadFileError or in a model that can be used; never in anything else.

For a long run: `python -m tests.weights.test_gguf_fuzz 300` (seconds).
"""

import collections
import contextlib
import dataclasses
import functools
import math
import pathlib
import random
import re
import resource
import sys
import tempfile
import time

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from strata_jax.errors import BadFileError
from strata_jax.weights.pack import Pack, open_pack
from strata_jax.weights.plan import make_plan
from tests.gguf_content import Sizes, model_pairs, model_tensors
from tests.gguf_maker import make_model
from tests.gguf_writer import Layout, Tensor

SIZES = Sizes(hidden=32, width=32, shared=32, low_rank=8, experts=2, gdn_dim=8, vocab=264)
MAX_S = 2.0
MAX_GROWTH = 200 << 20
RELAXED = settings(
    max_examples=400,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 8, 9, 13, 40, 42, 0x7F, 0xFF, 0xFFFF, 1 << 24]),
    st.sampled_from(
        [(1 << bits) + off for bits in (31, 32, 40, 62, 63, 64) for off in (-1, 0, 32)]
    ),
    st.integers(0, (1 << 64) - 1),
)

SMALL = st.integers(0, 300)
VALUES = st.one_of(
    st.tuples(st.just("u32"), SMALL),
    st.tuples(st.just("u64"), NUMBERS.map(lambda number: number % (1 << 64))),
    st.tuples(st.just("i32"), st.integers(-(1 << 31), (1 << 31) - 1)),
    st.tuples(st.just("f32"), st.floats(width=32)),
    st.tuples(st.just("bool"), st.booleans()),
    st.tuples(st.just("string"), st.text(st.characters(codec="utf-8"), max_size=8)),
    st.tuples(st.just("u64[]"), st.lists(SMALL, max_size=9)),
    st.tuples(st.just("i32[]"), st.lists(st.sampled_from([-1, 0, 1, 4]), max_size=6)),
    st.tuples(st.just("bool[]"), st.lists(st.booleans(), min_size=4, max_size=6)),
    st.tuples(st.just("string[]"), st.lists(st.just("a"), max_size=3)),
)
"""Kind and value of a metadata pair."""


@dataclasses.dataclass(frozen=True)
class Base:
    """The bytes of a sound set of files, and the places in them that mean something."""

    names: tuple[str, ...]
    files: tuple[bytes, ...]
    places: tuple[tuple[int, ...], ...]
    sections: tuple[tuple[int, ...], ...]
    """Starts of metadata, directory and data, and the end."""


@dataclasses.dataclass(frozen=True)
class Broken:
    """Files to try, and how they came about; that alone is printed when a test fails."""

    names: tuple[str, ...]
    files: tuple[bytes, ...]
    steps: tuple[object, ...]

    def __repr__(self) -> str:
        return f"Broken{self.names}{self.steps}"


@functools.cache
def base(shards: int) -> Base:
    with tempfile.TemporaryDirectory() as folder:
        made = make_model(pathlib.Path(folder) / "m.gguf", SIZES, shards=shards, seed=1)
        files = tuple(path.read_bytes() for path in made.paths)
    return Base(
        tuple(path.name for path in made.paths),
        files,
        tuple(_places(layout) for layout in made.layouts),
        tuple((24, each.directory, each.data, each.size) for each in made.layouts),
    )


def _places(layout: Layout) -> tuple[int, ...]:
    places = [0, 4, 8, 16]
    for key, at in layout.values.items():
        # Key length, value type, value; of arrays also the item count and the first items.
        places += [layout.pairs[key], at - 4, at, at + 4, at + 12, at + 16, at + 20]
    for name, at in layout.types.items():
        # Name length and name, dimensions, type, offset.
        dims = layout.dims[name]
        places += [layout.entries[name], layout.entries[name] + 8, dims, *range(dims + 4, at, 8)]
        places += [at, at + 4]
    return tuple(places)


@st.composite
def mutations(draw):
    """The files of a set, some of their bytes changed, moved or cut off."""
    origin = base(draw(st.sampled_from([1, 1, 1, 2])))
    files = [bytearray(raw) for raw in origin.files]
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        shard = draw(st.integers(0, len(files) - 1))
        step = _mutate(draw, files[shard], origin.places[shard], origin.sections[shard])
        steps.append((shard, *step))
    return Broken(origin.names, tuple(bytes(raw) for raw in files), tuple(steps))


def _mutate(
    draw, raw: bytearray, places: tuple[int, ...], sections: tuple[int, ...]
) -> tuple[object, ...]:
    kind = draw(
        st.sampled_from(["number", "number", "number", "byte", "cut", "drop", "add", "copy"])
    )
    part = draw(st.integers(0, len(sections) - 2))
    at = draw(st.integers(sections[part], sections[part + 1]))
    if kind == "number":
        at = draw(st.sampled_from(places))
        size = draw(st.sampled_from([1, 4, 8]))
        new = (draw(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
        raw[at : at + size] = new
    elif kind == "byte":
        new = draw(st.integers(0, 255))
        raw[at : at + 1] = bytes([new])
    elif kind == "cut":
        new = None
        del raw[at:]
    elif kind == "drop":
        new = draw(st.integers(1, 64))
        del raw[at : at + new]
    elif kind == "add":
        new = draw(st.binary(min_size=1, max_size=16))
        raw[at:at] = new
    else:
        new = draw(st.sampled_from(places))
        raw[at : at + 32] = raw[new : new + 32]
    return kind, at, new


@st.composite
def models(draw):
    """Sound files of a model whose settings or tensors do not fit together."""
    keys = [pair.key for pair in model_pairs(SIZES)]
    tensors = [name for name, _ in model_tensors(SIZES)]
    pairs, types = {}, {}
    for key in draw(st.lists(st.sampled_from(keys), max_size=2)):
        pairs[key] = draw(st.one_of(st.none(), VALUES))
    for name in draw(st.lists(st.sampled_from(tensors), max_size=2)):
        types[name] = draw(st.sampled_from([0, 1, 2, 8, 20, 30]))  # rows of 32 values take these
    drop = tuple(draw(st.lists(st.sampled_from(tensors), max_size=1)))
    extra = [
        Tensor(name, tuple(shape), 0, 4 * math.prod(shape))
        for name in drop
        for shape in [draw(st.lists(st.sampled_from([1, 2, 32, 264]), min_size=1, max_size=2))]
        if draw(st.booleans())
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "m.gguf"
        with contextlib.suppress(AssertionError):  # a type whose blocks do not fill the rows
            make_model(path, SIZES, pairs=pairs, types=types, drop=drop, extra=extra, sparse=True)
        raw = path.read_bytes() if path.exists() else b""
        return Broken((path.name,), (raw,), (pairs, types, drop, extra))


def check(broken: Broken) -> str | None:
    """Opens a set and uses everything if it opens; returns the message otherwise."""
    start = time.perf_counter()
    message = None
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in zip(broken.names, broken.files):
            (pathlib.Path(folder) / name).write_bytes(raw)
        try:
            pack = open_pack(pathlib.Path(folder) / broken.names[0])
        except BadFileError as error:
            message = str(error)
        else:
            with pack:
                _use_everything(pack)
        assert message is None or message.startswith(folder)
    assert message is None or (message.isprintable() and len(message) < 4000)
    assert time.perf_counter() - start < MAX_S
    return message


def _use_everything(pack: Pack) -> None:
    plan = make_plan(pack, None)
    assert plan.table()
    assert plan.to_json()
    assert len(pack.file_hash()) == 64
    for name, spec in pack.specs.items():
        view = pack.view(name)
        assert view.nbytes == pack.tensor(name).nbytes
        assert view[0] + view[-1].astype(int) >= 0
        if spec.use == "vector":
            assert pack.vector(name).dtype == np.float32
    for key in pack.file.metadata:
        with contextlib.suppress(BadFileError):  # strings of arrays are decoded only now
            assert pack.file.metadata[key] is not None


@RELAXED
@given(mutations())
def test_refuses_broken_files_in_bounded_time_and_memory(broken):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    check(broken)

    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH


@RELAXED
@given(models())
def test_refuses_sound_files_of_unsound_models(broken):
    check(broken)


def test_opens_what_it_mutates():
    for shards in (1, 2):
        origin = base(shards)
        assert check(Broken(origin.names, origin.files, ())) is None


def run_for(seconds: float) -> str:
    """Tries broken files until the time is up; says how many and what became of them."""
    until = time.monotonic() + seconds
    opened, refused = 0, collections.Counter()

    def count(broken: Broken) -> None:
        nonlocal opened
        message = check(broken)
        if message is None:
            opened += 1
        else:  # without the folder and whatever is only a number or a name
            refused[re.sub(r"^[^:]*: |\d+|'.*?'|(tensor|metadata) \S+", "", message)[:40]] += 1

    while time.monotonic() < until:
        seed(random.getrandbits(64))(RELAXED(given(mutations() | models())(count)))()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return (
        f"{opened} opened, {refused.total()} refused in {len(refused)} ways, peak {peak} MiB\n"
        + "\n".join(f"{number:7} {kind}" for kind, number in refused.most_common(60))
    )


if __name__ == "__main__":
    sys.stdout.write(run_for(float(sys.argv[1])) + "\n")
