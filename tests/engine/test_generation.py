"""Answers by windows with drafts: those that windows of one row give, whatever comes true."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_jax.engine.draft_flow import DraftFlow
from strata_jax.engine.draft_length import DraftLength
from strata_jax.engine.drafting import Drafting, Source
from strata_jax.engine.drafts import Drafted
from strata_jax.engine.generation import Generation
from strata_jax.engine.options import EngineOptions
from strata_jax.engine.request import Request, SamplingSettings
from strata_jax.engine.runner import Runner, RunnerOptions
from strata_jax.engine.scripted_drafter import ScriptedDrafter
from strata_jax.engine.scripted_follower import ScriptedFollower
from strata_jax.ops.native import Backend
from tests.stepper import same_bits, same_state

CONTEXT = 192
GREEDY = SamplingSettings(temperature=0.0)
PENALISED = SamplingSettings(
    temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.4
)
SAMPLED = SamplingSettings(temperature=1.0, top_k=40, top_p=0.95, min_p=0.01, seed=9)
PROMPT = tuple(range(3, 80))


def ignore(_):
    pass


def opened(pack, **options):
    return Runner(pack, pack.config, RunnerOptions(max_context=CONTEXT, **options), ignore)


@pytest.fixture(scope="module")
def runner(tiny_pack):
    runner = opened(tiny_pack, drafts=True, residual=True)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def emulated(tiny_pack):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strata_jax.engine.runner_options.TILE_ROWS", {"cpu": 64})  # it is emulated
        runner = opened(tiny_pack, drafts=True, backend=Backend("emulated"))
    yield runner
    runner.close()


def begin(
    runner,
    sampling=GREEDY,
    drafter=None,
    *,
    drafts=7,
    tokens=24,
    logits=True,
    stop=(),
    flow=None,
    length=None,
    repeats=0,
):
    request = Request(
        ids=PROMPT,
        settings=sampling,
        max_tokens=tokens,
        stop_ids=frozenset(map(int, stop)),
        max_repeats=repeats,
    )
    options = EngineOptions(all_logits=logits)
    drafting = None
    if drafter is not None:
        source = Source(name="test", drafter=drafter, length=length, flow=flow)
        drafting = Drafting([source], drafts)
    return Generation(runner, request, options, drafting, None)


@pytest.fixture(scope="module")
def answers(runner):
    """Ids and logits of an answer without drafts, by its settings."""
    known = {}

    def answer(sampling, tokens=24):
        if (sampling, tokens) not in known:
            generation = begin(runner, sampling, tokens=tokens)
            known[sampling, tokens] = list(generation), generation.logits
        return known[sampling, tokens]

    return answer


def script(ids, percent):
    return ScriptedDrafter([np.asarray([*PROMPT, *ids], np.int32)], percent)


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED, SAMPLED], ids=["greedy", "all", "sampled"])
@pytest.mark.parametrize(("drafts", "percent"), [(1, 50), (3, 100), (7, 0), (7, 60), (5, 85)])
def test_drafts_change_neither_ids_nor_logits(runner, answers, sampling, drafts, percent):
    ids, logits = answers(sampling)

    generation = begin(runner, sampling, script(ids, percent), drafts=drafts)

    assert list(generation) == ids
    assert same_bits(generation.logits, logits)
    counts = generation.drafts
    assert counts is not None
    assert counts["drafted"] > 0
    assert (counts["accepted"] > 0) == (percent > 0)
    assert (counts["accepted"] < counts["drafted"]) == (percent < 100)
    assert counts["tokens_per_pass"] == (len(ids) - 1) / counts["passes"]
    assert max(generation.windows) <= 8


@pytest.fixture(scope="module")
def following(emulated):
    """An answer with drafts that a device finds by itself."""
    follower = ScriptedFollower(script([], 100), emulated)
    flow = DraftFlow(emulated, follower)

    def answer(ids, percent, sampling=GREEDY, **how):
        follower._drafter = script(ids, percent)
        drafter = follower._drafter
        return begin(emulated, sampling, drafter, logits=False, flow=flow, **how)

    return answer


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED, SAMPLED], ids=["greedy", "all", "sampled"])
def test_a_device_draws_the_same_ids_with_drafts_as_without(emulated, following, sampling):
    ids = list(begin(emulated, sampling, logits=False, tokens=9))

    asked = begin(emulated, sampling, script(ids, 50), drafts=7, tokens=9, logits=False)
    assert list(asked) == ids
    alone = following(ids, 70, sampling, drafts=3, tokens=9)
    assert list(alone) == ids
    assert alone.drafts is not None
    assert 0 < alone.drafts["accepted"] < alone.drafts["drafted"]
    assert emulated.position == len(PROMPT) + 8


@pytest.mark.parametrize("ending", ["stop", "cancelled"])
def test_an_answer_that_a_device_finds_leaves_what_it_has_read(emulated, following, ending):
    """Whatever was in the queue: behind the end windows change nothing."""
    known = list(begin(emulated, logits=False, tokens=12))
    place = next(place for place in range(2, 9) if known[place] not in known[:place])
    stop = [known[place]] if ending == "stop" else []

    generation = following(known, 100, drafts=3, tokens=12, stop=stop)
    found = list(itertools.islice(generation, place + 1))
    generation.cancel()

    assert found == known[: place + 1]
    read = emulated.position - len(PROMPT)
    assert read == place or ending == "cancelled"
    assert read >= place
    emulated._settle()
    state = jax.tree.map(jnp.array, emulated._state)
    list(begin(emulated, logits=False, tokens=read + 1, drafter=script(known, 100)))
    emulated._settle()
    assert same_state(state, emulated._state, len(PROMPT) + read, 4)


@pytest.mark.parametrize("place", range(1, 12))
def test_ends_at_a_stop_id_inside_a_window(runner, answers, place):
    ids, _ = answers(SAMPLED)
    first = ids.index(ids[place])

    generation = begin(runner, SAMPLED, script(ids, 100), stop=[ids[place]])

    assert list(generation) == ids[: first + 1]
    assert generation.finish_reason == "stop"
    assert runner.position == len(PROMPT) + first
    assert len(generation.logits) == len(PROMPT) - 63 + first  # a tile gives its last row's


@pytest.mark.parametrize("tokens", range(1, 12))
def test_ends_at_its_length_inside_a_window(runner, answers, tokens):
    ids, _ = answers(GREEDY)

    generation = begin(runner, GREEDY, script(ids, 100), tokens=tokens)

    assert list(generation) == ids[:tokens]
    assert generation.finish_reason == "length"
    assert runner.position == len(PROMPT) + tokens - 1


@pytest.mark.parametrize("repeats", [0, 1, 5, 11])
def test_an_answer_that_is_stuck_on_one_id_ends_inside_a_window(runner, repeats):
    """Report 86; ids of the prompt and drafts behind the end do not count."""
    stuck = SamplingSettings(temperature=0.0, logit_bias=((PROMPT[-1], 1000.0),))
    drafter = script([PROMPT[-1]] * 24, 100)

    generation = begin(runner, stuck, drafter, drafts=3, repeats=repeats)

    assert list(generation) == [PROMPT[-1]] * (repeats or 24)
    assert generation.finish_reason == "length"
    assert generation.stuck_on == (PROMPT[-1] if repeats else None)
    assert runner.position == len(PROMPT) + (repeats or 24) - 1


@pytest.mark.parametrize("percent", [100, 75])
def test_ends_at_the_end_of_the_context(runner, answers, percent):
    ids, _ = answers(GREEDY, 1000)
    assert len(ids) == CONTEXT - len(PROMPT) + 1

    generation = begin(runner, GREEDY, script(ids, percent), tokens=1000)

    assert list(generation) == ids
    assert generation.finish_reason == "length"
    assert runner.position == CONTEXT


@pytest.mark.parametrize("count", range(1, 12))
def test_a_cancelled_answer_leaves_what_it_has_read(runner, stepper, answers, count):
    ids, _ = answers(GREEDY)
    generation = begin(runner, GREEDY, script(ids, 100))

    assert list(itertools.islice(generation, count)) == ids[:count]
    generation.cancel()

    length = len(PROMPT) + count - 1
    assert runner.position == length
    assert generation.finish_reason == "cancelled"
    assert same_settled(runner, stepper, [*PROMPT, *ids][:length])


def same_settled(runner, stepper, ids):
    """Whether the runner's state is that of reading `ids`, by a tile of 64 and windows."""
    runner._settle()
    _, state = stepper.read(ids[:64], steps=[64], width=256, form="tile")
    _, state = stepper.read(ids[64:], steps=8, start=(state, 64))
    cells = runner._state.cells[0].keys.shape[0]
    assert stepper.cells >= cells
    return same_state(runner._state, cut_cells(state, cells), len(ids), 4)


def cut_cells(state, cells):
    """The state with a cache of as many cells as the runner's."""
    groups = cells // 4 // 16 + 1
    layers = [
        type(layer)(
            keys=layer.keys[:cells],
            values=layer.values[:cells],
            index_raw=layer.index_raw[:cells],
            index_keys=layer.index_keys[:groups],
            scales=layer.scales,
        )
        for layer in state.cells
    ]
    return type(state)(cells=tuple(layers), recurrent=state.recurrent)


WINDOW = st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 511))


@settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(WINDOW, min_size=1, max_size=8))
def test_any_acceptance_leaves_the_state_of_reading_one_by_one(runner, stepper, ids, windows):
    """Contract W, leaf by leaf: drafts in windows, as many kept as chance says, the rest wrong."""
    text = [int(each) for each in ids[:64]]
    runner.reset()
    runner.read_tile(np.asarray(text), want_logits=True)
    following = iter(ids[64:])
    logits, kept = np.zeros((1, 512), np.float32), 0
    for drafts, kept, wrong in windows:
        kept = min(drafts, kept)
        new = [int(next(following)) for _ in range(1 + kept)]
        rest = [(wrong + i) % 512 for i in range(drafts - kept)]
        logits = runner.read_drafts(np.asarray([*new, *rest])).copy()
        runner.keep(kept)
        text += new

    expected, _ = stepper.read(text[64:], steps=8, start=tile_state(stepper, text))
    assert runner.position == len(text)
    assert same_bits(logits[: 1 + kept], expected[-(1 + kept) :])
    assert same_settled(runner, stepper, text)


def tile_state(stepper, text):
    return stepper.read(text[:64], steps=[64], width=256, form="tile")[1], 64


class Recorder:
    """Drafts from a script and remembers what it was told."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.positions: list[int] = []
        self.ids: list[int] = []
        self.residuals: list[np.ndarray] = []

    def reset(self) -> None:
        self.drafter.reset()

    def read(self, ids: np.ndarray, residual, position: int) -> None:
        self.positions += range(position, position + len(ids))
        self.ids += ids.tolist()
        self.residuals.append(np.asarray(residual)[: len(ids)].copy())
        self.drafter.read(ids, residual, position)

    def draft(self, count: int) -> Drafted:
        return self.drafter.draft(count)


def test_drafters_hear_of_every_position_once_with_its_residual(runner, answers):
    ids, _ = answers(GREEDY)
    told = []
    for percent in (100, 40, 0):
        recorder = Recorder(script(ids, percent))
        list(begin(runner, GREEDY, recorder))
        told.append(recorder)

    for recorder in told:
        count = len(recorder.ids)
        assert recorder.positions == list(range(-1, count - 1))  # the first id follows nothing
        assert recorder.ids == [*PROMPT, *ids][:count]
        assert count >= len(PROMPT) + len(ids) - 9
    shortest = min(len(recorder.ids) for recorder in told)
    residuals = [np.concatenate(recorder.residuals)[:shortest] for recorder in told]
    assert residuals[0].shape == (shortest, 4, 64)
    assert same_bits(residuals[0], residuals[1])
    assert same_bits(residuals[0], residuals[2])


class Sometimes(Recorder):
    """Has drafts for two positions in five only."""

    empty = 0
    """How often it had none."""

    def draft(self, count: int) -> Drafted:
        has_some = self.positions[-1] % 5 < 2
        self.empty += not has_some
        return super().draft(count if has_some else 0)


class Lengths(DraftLength):
    """Always wants drafts; remembers which windows were told to have been asked for some in vain."""

    def __init__(self):
        super().__init__(3, ahead=True)
        self.missed = 0

    def choose(self, room: int) -> tuple[int, float]:
        return min(room, 3), 1.0

    def seen(self, came_true: int, seconds: float, *, wanted: int) -> bool:
        self.missed += wanted > 0 and came_true == 0
        return False


@pytest.mark.parametrize("tokens", [1, 2, 3, 14])
def test_a_device_goes_ahead_while_nobody_drafts(emulated, tokens):
    """What it has in its queue when drafts turn up is no window whose drafts did not come true."""
    ids = list(begin(emulated, SAMPLED, logits=False, tokens=14))
    drafter, lengths = Sometimes(script(ids, 100)), Lengths()

    generation = begin(
        emulated, SAMPLED, drafter, drafts=3, tokens=tokens, logits=False, length=lengths
    )

    assert list(generation) == ids[:tokens]
    assert drafter.positions == list(range(-1, len(drafter.ids) - 1))
    assert drafter.ids == [*PROMPT, *ids][: len(drafter.ids)]
    assert lengths.missed <= drafter.empty
    if tokens == 14:
        assert generation.windows[1] >= 1
        assert generation.windows[4] >= 1
