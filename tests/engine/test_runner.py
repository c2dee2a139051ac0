"""The runner: tiles and windows over one state that stays where it is."""

import re

import jax
import numpy as np
import pytest

from strata_jax.config import TILE_ROWS, KvType
from strata_jax.engine.runner import GRAIN, Runner, RunnerOptions
from strata_jax.ops.native import Backend
from tests.stepper import same_bits, same_state, without_drafts


def ignore(_):
    pass


@pytest.fixture(scope="module")
def runner(tiny_pack):
    """The small model, logits of every row."""
    options = RunnerOptions(max_context=512, all_logits=True)
    runner = Runner(tiny_pack, tiny_pack.config, options, ignore)
    yield runner
    runner.close()


@pytest.fixture(scope="module", params=["tiny_pack", "embedded_pack"])
def programs(request):
    """A runner as the engine makes it, for what its programs look like."""
    pack = request.getfixturevalue(request.param)
    kv: KvType = "fp16" if request.param == "tiny_pack" else "int8"
    runner = Runner(pack, pack.config, RunnerOptions(max_context=400, kv=kv), ignore)
    yield runner
    runner.close()


def addresses(runner):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(runner._state)]


def test_tiles_are_multiples_of_the_grain():
    assert all(rows % GRAIN == 0 for rows in TILE_ROWS.values())


@pytest.mark.parametrize(
    "tiles", [(256, 192), (64, 256, 128), (192, 256), (64,) * 7, (128, 192, 128)]
)
def test_tiles_from_any_multiple_of_the_grain_give_the_same_bits(runner, stepper, ids, tiles):
    ids = np.resize(ids, 448)
    runner.reset()
    parts, at = [], 0
    for size in tiles:
        parts.append(runner.read_tile(ids[at : at + size], want_logits=True).copy())
        at += size

    logits, state = stepper.read(ids, steps=8)
    assert same_bits(np.concatenate(parts), logits)
    assert same_state(runner._state, state, 448, 4)


@pytest.fixture(scope="module")
def chunked(tiny_pack):
    """The same, two tiles at once."""
    options = RunnerOptions(max_context=512, all_logits=True, chunk_tiles=2)
    runner = Runner(tiny_pack, tiny_pack.config, options, ignore)
    yield runner
    runner.close()


@pytest.mark.parametrize("chunks", [(448,), (256, 192), (320, 128), (64, 384)])
def test_tiles_read_at_once_give_the_same_bits(chunked, stepper, ids, chunks):
    ids = np.resize(ids, 448)
    assert chunked.chunk_rows == 2 * chunked.tile_rows
    chunked.reset()
    parts, at = [], 0
    for size in chunks:
        parts.append(chunked.read_tile(ids[at : at + size], want_logits=True).copy())
        at += size

    logits, state = stepper.read(ids, steps=8)
    assert same_bits(np.concatenate(parts), logits)
    assert same_bits(chunked._state.recurrent, without_drafts(state).recurrent)


@pytest.mark.parametrize("live", [1, 64, 100, 256])
@pytest.mark.parametrize("programs", ["tiny_pack"], indirect=True)
def test_a_tile_gives_its_last_rows_logits(runner, programs, ids, live):
    runner.reset()
    programs.reset()

    last = programs.read_tile(np.asarray(ids[:live]), want_logits=True)

    rows = runner.read_tile(np.asarray(ids[:live]), want_logits=True)
    assert last.shape == (1, rows.shape[1])
    assert same_bits(last[0], rows[-1])


def test_a_devices_next_tile_is_queued_while_one_runs(tiny_pack, ids, monkeypatch):
    monkeypatch.setattr("strata_jax.engine.runner_options.TILE_ROWS", {"cpu": 64})  # it is emulated
    options = RunnerOptions(max_context=192, backend=Backend("emulated"))
    runner = Runner(tiny_pack, tiny_pack.config, options, ignore)

    def read(want_logits):
        runner.reset()
        for begin in (0, 64, 128):
            want = want_logits or begin == 128
            logits = runner.read_tile(np.asarray(ids[begin : begin + 64]), want_logits=want)
        return logits.copy()

    assert same_bits(read(False), read(True))
    runner.close()


def test_a_tile_starts_on_the_grain(runner, ids):
    runner.reset()
    runner.read_window(np.asarray(ids[:3]))

    with pytest.raises(AssertionError):
        runner.read_tile(np.asarray(ids[3:67]), want_logits=True)


def test_logits_nobody_wants_are_not_computed(runner, ids):
    runner.reset()
    assert not runner.read_window(np.asarray(ids[:5]), want_logits=False).any()


def test_the_state_stays_at_its_addresses(programs, ids):
    programs.reset()
    before = addresses(programs)

    programs.read_tile(np.asarray(ids[:256]), want_logits=True)
    programs.read_tile(np.asarray(ids[256:320]), want_logits=True)
    for token in ids[320:330]:
        programs.read_window(np.asarray([token]))

    moved = [
        jax.tree_util.keystr(path)
        for (path, _), old, new in zip(
            jax.tree_util.tree_leaves_with_path(programs._state), before, addresses(programs)
        )
        if old != new
    ]
    assert moved == []


@pytest.mark.parametrize("is_tile", [False, True])
def test_compiled_programs_copy_no_leaf_of_the_state(programs, is_tile: bool):
    programs.reset()
    program = programs._programs.tiles[programs.tile_rows] if is_tile else programs._programs.window
    leaves = jax.tree.leaves(programs._state)
    kinds = {"float32": "f32", "float16": "f16", "int8": "s8", "int32": "s32"}
    shapes = {f"{kinds[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]" for leaf in leaves}
    text = program.as_text()

    copies = re.findall(r"= (\S+?)\{\S* copy(?:-start)?\(", text)
    assert text.count(" custom-call(") >= 4 * programs.config.num_layers
    assert shapes.isdisjoint(copies)
    aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    assert aliased is not None
    assert aliased[1].count("alias)") == len(leaves)


def test_a_step_that_fails_leaves_no_state_behind(runner, ids):
    runner.reset()
    runner.read_window(np.asarray(ids[:8]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="embed_rows"):
        runner.read_window(np.asarray([10**6]))

    with pytest.raises(AssertionError, match="reset before reading"):
        runner.read_window(np.asarray(ids[:1]))
    runner.reset()
    assert np.isfinite(runner.read_window(np.asarray(ids[:8]))).all()


def test_finds_the_ids_that_the_logits_say(runner, ids):
    runner.reset()
    runner.read_window(np.asarray(ids[:8]))
    expected, token = [], 7
    for _ in range(5):
        token = int(runner.read_window(np.asarray([token]))[0].argmax())
        expected.append(token)
    runner.reset()
    runner.read_window(np.asarray(ids[:8]))

    assert list(runner.best_ids(7, 5)) == expected
    assert list(runner.best_ids(7, 0)) == []
    assert runner.position == 13


def test_an_empty_state_lies_where_the_old_one_lay(runner, ids):
    """A captured graph knows addresses: a state elsewhere would be recorded anew for every request.

    Likewise results, which a GPU's windows write where those of the window before lay.
    """

    def addresses() -> list[int]:
        leaves = jax.tree.leaves((runner._state, runner._results))
        return [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]

    runner.reset()
    runner.read_window(np.asarray(ids[:4]))
    before = addresses()

    runner.reset()

    assert addresses() == before
    cold = runner.read_window(np.asarray(ids[:4])).copy()
    runner.reset()
    assert same_bits(runner.read_window(np.asarray(ids[:4])), cold)
