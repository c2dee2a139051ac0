"""The engine: prompts of every length, how answers end, and what must not change them."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from strata_jax.engine.engine import Engine, EngineOptions
from strata_jax.engine.options import kv_notes
from strata_jax.engine.request import SamplingSettings
from strata_jax.engine.tiers import EngineTiers
from strata_jax.errors import CapacityError, StrataError, UsageError
from strata_jax.weights.ngram_table import NgramTable
from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model
from tests.gguf_writer import patch
from tests.stepper import Stepper, same_bits

WARM = SamplingSettings(temperature=1.0, seed=5)


def opened(pack, **options):
    return Engine.open(pack, EngineOptions(**options))


@pytest.fixture(scope="module")
def expected(stepper, ids):
    """Logits of 310 ids read in windows."""
    return stepper.read(ids[:310], steps=8)[0]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 256, 257, 300])
def test_a_prompt_of_any_length_gives_the_logits_of_its_ids_read_by_hand(
    engine, request_of, ids, expected, length
):
    generation = engine.start(request_of(ids[:length], max_tokens=0))

    assert list(generation) == []
    assert generation.finish_reason == "length"
    assert same_bits(generation.logits, expected[:length])


@pytest.mark.parametrize("length", [1, 64, 100])
def test_an_answer_is_the_one_read_by_hand(engine, stepper, request_of, ids, length):
    answer = list(engine.start(request_of(ids[:length], max_tokens=5)))

    logits, state = stepper.read(ids[:length], steps=8)
    by_hand = [int(logits[-1].argmax())]
    for position in range(length, length + 4):
        logits, state = stepper.step(state, by_hand[-1:], position, width=8)
        by_hand.append(int(logits[0].argmax()))
    assert answer == by_hand


def test_logits_of_prompt_and_answer_equal_those_of_the_whole_text(engine, request_of, ids):
    generation = engine.start(request_of(ids[:70], max_tokens=6, settings=WARM))
    text = ids[:70] + list(generation)
    kept = generation.logits

    again = engine.start(request_of(text[:-1], max_tokens=0))
    list(again)

    assert kept.shape == (75, TINY.vocab)
    assert same_bits(kept, again.logits)


def test_requests_leave_nothing_behind(engine, request_of, ids):
    first = engine.start(request_of(ids[:130], settings=WARM))
    answer = list(first)

    list(engine.start(request_of(ids[130:390], max_tokens=9)))
    again = engine.start(request_of(ids[:130], settings=WARM))

    assert list(again) == answer
    assert same_bits(again.logits, first.logits)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_window_rows_and_threads_do_not_change_an_answer(engine, tiny_pack, request_of, ids, rows):
    request = request_of(ids[:90], max_tokens=8, settings=WARM)
    other = opened(tiny_pack, window_rows=rows, threads=1 + rows % 2, max_context=128)

    answer = list(other.start(request))

    other.close()
    assert answer == list(engine.start(request))


@pytest.mark.parametrize("tiles", [1, 2, None])
def test_chunks_tell_how_far_a_prompt_has_been_read(engine, tiny_pack, request_of, ids, tiles):
    other = opened(tiny_pack, prefill=tiles)
    request = request_of(np.resize(ids, 600 - 88), max_tokens=1)
    told = []

    answer = list(other.start(request, told.append))

    other.close()
    assert told == {1: [256, 512], 2: [512], None: [256, 512]}[tiles]
    assert answer == list(engine.start(request))


def test_a_prompt_stopped_at_a_chunks_border_goes_on_there(tiny_pack, request_of, ids):
    """With the bits of a cold read; another prompt begins anew."""
    engine = opened(tiny_pack, prefill=1)
    told = []

    def stop(read: int) -> None:
        raise KeyboardInterrupt

    def answer(asked, stopped=False):
        if stopped:
            with pytest.raises(KeyboardInterrupt):
                list(engine.start(asked, stop))
        generation = engine.start(asked, told.append)
        return list(generation), engine._runner.read_window(np.asarray([7])).copy()

    # Stopped at a border before others, at the last one, and at the prompt's very end, where nothing goes on.
    for length, borders, kept in [(450, [448], 256), (200, [], 192), (256, [256], 0)]:
        request = request_of(np.resize(ids, length), max_tokens=5)
        other = request_of([*request.ids[:256], 1, 2, 3], max_tokens=5)
        cold, fresh = answer(request), answer(other)
        told.clear()
        resumed = answer(request, stopped=True)
        assert told == borders
        with pytest.raises(KeyboardInterrupt):
            list(engine.start(request, stop))
        assert engine.kept == kept
        begun_anew = answer(other)
        for got, wanted in [(resumed, cold), (begun_anew, fresh)]:
            assert got[0] == wanted[0]
            assert same_bits(got[1], wanted[1])
    engine.close()


OUT_OF_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")


def test_a_step_without_memory_ends_one_request_with_a_sentence(
    engine, request_of, ids, monkeypatch
):
    def fail(*_, **__):
        raise OUT_OF_MEMORY

    with monkeypatch.context() as patched:
        patched.setattr(engine._runner, "read_window", fail)
        with pytest.raises(CapacityError, match="XLA: 9 B asked for"):
            list(engine.start(request_of(ids[:5])))

    assert len(list(engine.start(request_of(ids[:5])))) == 4


def test_what_was_opened_is_closed_where_compiling_fails(tiny_pack, monkeypatch):
    closed = []

    def fail(*_):
        raise OUT_OF_MEMORY

    def note(kind):
        close = kind.close
        monkeypatch.setattr(kind, "close", lambda self: (closed.append(kind), close(self)))

    monkeypatch.setattr("strata_jax.engine.runner.Compiler.compile", fail)
    note(EngineTiers)
    note(NgramTable)

    with pytest.raises(CapacityError, match="XLA: 9 B asked for"):
        opened(tiny_pack)

    assert closed == [EngineTiers, NgramTable]


def test_a_full_context_ends_an_answer(tiny_pack, request_of, ids):
    engine = opened(tiny_pack, max_context=20)

    for length, drawn in ((18, 3), (20, 1)):  # the last id drawn needs no place
        generation = engine.start(request_of(ids[:length], max_tokens=50))
        assert len(list(generation)) == drawn
        assert generation.finish_reason == "length"
    engine.close()


def test_a_stop_id_ends_an_answer_and_is_part_of_it(engine, request_of, ids):
    free = list(engine.start(request_of(ids[:9], max_tokens=8, settings=WARM)))
    stop = free[3]

    generation = engine.start(request_of(ids[:9], max_tokens=8, settings=WARM, stop_ids=[stop]))

    assert list(generation) == free[: free.index(stop) + 1]
    assert generation.finish_reason == "stop"


def test_a_stop_id_in_the_prompt_ends_nothing(engine, request_of, ids):
    generation = engine.start(request_of(ids[:9], max_tokens=1, stop_ids=ids[:9]))

    assert len(list(generation)) == 1


def test_cancel_ends_an_answer_after_the_id_drawn_last(engine, request_of, ids):
    generation = engine.start(request_of(ids[:9], max_tokens=8))
    next(generation)

    generation.cancel()

    assert list(generation) == []
    assert generation.finish_reason == "cancelled"
    assert generation.logits.shape == (9, TINY.vocab)


def test_cancel_before_the_first_id_reads_nothing(engine, request_of, ids):
    generation = engine.start(request_of(ids[:9]))

    generation.cancel()

    assert list(generation) == []
    assert generation.logits.shape == (0, TINY.vocab)


def test_cancel_after_the_end_changes_nothing(engine, request_of, ids):
    generation = engine.start(request_of(ids[:9]))
    list(generation)

    generation.cancel()

    assert generation.finish_reason == "length"


def test_a_new_request_ends_the_one_before(engine, request_of, ids):
    old = engine.start(request_of(ids[:9], max_tokens=100))
    next(old)

    answer = list(engine.start(request_of(ids[:40])))

    assert list(old) == []
    assert old.finish_reason == "cancelled"
    assert answer == list(engine.start(request_of(ids[:40])))


def test_close_ends_a_request(tiny_pack, request_of, ids):
    engine = opened(tiny_pack, max_context=64)
    generation = engine.start(request_of(ids[:9], max_tokens=50))
    next(generation)

    engine.close()

    assert list(generation) == []
    assert generation.finish_reason == "cancelled"


def test_timings_count_ids_and_leave_out_what_was_not_measured(engine, request_of, ids):
    generation = engine.start(request_of(ids[:70], max_tokens=5))
    assert generation.timings.prompt_s is None
    next(generation)
    assert generation.timings.decode_tok_s is None
    list(generation)

    timings = generation.timings
    assert timings.prompt_s is not None
    assert timings.decode_s is not None
    assert timings.prompt_tok_s == pytest.approx(70 / timings.prompt_s)
    assert timings.decode_tok_s == pytest.approx(4 / timings.decode_s)
    assert timings.load_s > 0
    assert timings.compile_s > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": ()}, "prompt: no tokens"),
        ({"ids": (1, 2, 512)}, "prompt: id 512 at place 2, expected ids from 0 to 511"),
        ({"ids": (-1,)}, "prompt: id -1 at place 0"),
        ({"ids": (1,) * 513}, "prompt: 513 tokens, at most 512 fit"),
        ({"max_tokens": -1}, "max_tokens: -1, expected 0 or more"),
        ({"max_repeats": -1}, "max_repeats: -1, expected 0 .any. or more"),
    ],
)
def test_a_request_out_of_range_is_a_usage_error(engine, request_of, changes, message):
    with pytest.raises(UsageError, match=message):
        engine.start(dataclasses.replace(request_of([1]), **changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": 0}, "prefill: 0 tiles, expected 1 to 64"),
        ({"window_rows": 0}, "window_rows: 0, expected 1 to 64"),
        ({"window_rows": 65}, "window_rows: 65, expected 1 to 64"),
        ({"threads": 0}, "threads: 0, expected 1 to 1024"),
        ({"threads": 2000}, "threads: 2000, expected 1 to 1024"),
        ({"max_context": 0}, "max_context: 0, expected 1 to"),
        ({"platform": "cuda", "routing_out": Path("x")}, "--routing_out: not available on a GPU"),
        ({"index_budget": 33}, "index_budget: 33, expected a positive multiple of 4"),
        ({"index_budget": 1 << 40}, "of this file, and at most 16777216"),
        ({"index_budget": 0}, "index_budget: 0, expected a positive multiple of 4"),
        ({"index_budget": -4}, "index_budget: -4, expected a positive multiple of 4"),
    ],
)
def test_an_option_out_of_range_is_a_usage_error(tiny_pack, options, message):
    with pytest.raises(UsageError, match=message):
        opened(tiny_pack, **options)


def test_an_index_budget_is_honoured_in_prompt_and_answer_and_told(tiny_pack, request_of, ids):
    engine = opened(tiny_pack, index_budget=64, all_logits=True)
    wide = Stepper(tiny_pack, config=dataclasses.replace(tiny_pack.config, index_budget=64))

    generation = engine.start(request_of(ids[:100]))
    text = ids[:100] + list(generation)

    assert engine.notes[:1] == ("index_budget: 64 tokens in force, the file says 32",)
    assert same_bits(generation.logits, wide.read(text[:-1], steps=8)[0])
    engine.close()


@pytest.mark.parametrize("kv", ["fp16", "int8", "f32"])
def test_a_cache_of_any_type_is_honoured_and_a_coarse_one_told(tiny_pack, request_of, ids, kv):
    engine = opened(tiny_pack, kv=kv, all_logits=True)
    stepper = Stepper(tiny_pack, kv=kv)

    generation = engine.start(request_of(ids[:70], max_tokens=0))
    assert list(generation) == []

    assert same_bits(generation.logits, stepper.read(ids[:70], steps=64, width=256)[0])
    told = [note for note in engine.notes if note.startswith("kv: int8 rounds")]
    assert len(told) == (kv == "int8")
    engine.close()


@pytest.mark.parametrize(("platform", "lines"), [("cpu", 0), ("cuda", 1)])
def test_a_float32_cache_is_told_to_be_slow_where_it_is(platform, lines):
    assert len(kv_notes("f32", platform)) == lines
    assert kv_notes("fp16", platform) == ()


def test_an_index_budget_needs_a_file_with_an_indexer(tmp_path):
    dense = {"qwen4exp.attention.compress_ratios": ("i32[]", [0] * 5)}
    made = make_model(tmp_path / "dense.gguf", pairs=dense)
    message = "index_budget: 64, but the file attends to every token"

    with open_pack(made.path) as pack, pytest.raises(UsageError, match=message):
        opened(pack, index_budget=64)


def test_a_context_beyond_the_files_is_kept_with_a_note(tiny_pack):
    engine = opened(tiny_pack, max_context=600)

    assert engine.max_context == 600
    assert engine.notes[:1] == ("max_context: 600 is more than the file's 512; kept",)
    engine.close()


def test_numbers_that_are_not_finite_end_an_answer_with_an_error(tmp_path, request_of):
    made = make_model(tmp_path / "broken.gguf")
    at = made.layouts[0].tensors["blk.2.hc_ffn_norm.weight"]
    patch(made.path, at, np.full(8, np.nan, np.float32).tobytes())

    with open_pack(made.path) as pack:
        engine = opened(pack, max_context=64)
        with pytest.raises(StrataError, match="position 3 are not finite"):
            list(engine.start(request_of([1, 2, 3])))
        engine.close()


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-6}])
def test_of_equal_rows_of_the_head_the_lowest_id_wins_for_every_seed(tmp_path, request_of, greedy):
    made = make_model(tmp_path / "ties.gguf")
    row_bytes, head = 4 * TINY.hidden, made.layouts[0].tensors["output.weight"]
    best = 2 * np.frombuffer(made.path.read_bytes()[head : head + row_bytes], np.float32)
    for token in (300, 77, 411):
        patch(made.path, head + token * row_bytes, (100 * best).tobytes())
        patch(made.path, head + (token + 1) * row_bytes, (-100 * best).tobytes())

    with open_pack(made.path) as pack:
        engine = opened(pack, max_context=64)
        answers = {
            next(engine.start(request_of([5, 6], settings=SamplingSettings(seed=seed, **greedy))))
            for seed in range(20)
        }
        engine.close()

    assert answers <= {77, 78}
    assert len(answers) == 1


def test_nothing_compiles_after_the_start(tiny_pack, request_of, ids):
    compiled = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    engine = opened(tiny_pack, max_context=700)  # a cache of a size that no other test has
    assert len(compiled) >= 3
    compiled.clear()

    for length in (1, 64, 300):
        list(engine.start(request_of(ids[:length], settings=WARM)))

    jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    engine.close()


def test_opening_reports_its_phases(tiny_pack):
    lines = []

    Engine.open(tiny_pack, EngineOptions(max_context=64), lines.append).close()

    assert lines == ["compiling the program for 8 rows", "compiling the program for 256 rows"]
