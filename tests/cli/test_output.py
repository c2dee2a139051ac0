import io
import json
import threading

import pytest

from strata_jax.cli.output import BEAT_S, Output, _Progress
from tests.cli.fake_engine import Terminal


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _progress(overwrites: bool = False, at_once: bool = True):
    written: list[str] = []
    clock = Clock()
    return _Progress(written.append, overwrites, at_once, clock), written, clock


def test_writes_a_line_per_phase():
    progress, written, _ = _progress()

    for line in ("loading: 1 of 4", "loading: 2 of 4", "compiling", "compiling"):
        progress.report(line)

    assert written == ["loading: 1 of 4\n", "compiling\n"]


def test_repeats_a_phase_only_now_and_then():
    progress, written, clock = _progress()

    for step in range(20):
        clock.now = float(step)
        progress.report(f"loading: {step}")

    assert written == [f"loading: {step}\n" for step in (0, 5, 10, 15)]


def test_a_beat_breaks_the_silence():
    progress, written, clock = _progress()
    progress.report("compiling")

    clock.now = 3.0
    progress.beat()
    clock.now = BEAT_S
    progress.beat()

    assert written == ["compiling\n", "compiling (10 s)\n"]


def test_a_short_wait_leaves_no_trace():
    progress, written, clock = _progress(at_once=False)

    progress.report("reading")
    clock.now = BEAT_S
    progress.beat()

    assert written == ["reading (10 s)\n"]


def test_overwrites_at_a_terminal():
    progress, written, _ = _progress(overwrites=True)

    progress.report("loading: 1")
    progress.report("loading: 2")
    progress.clear()
    progress.clear()

    assert written == ["\r\x1b[Kloading: 1", "\r\x1b[Kloading: 2", "\r\x1b[K"]


def test_other_output_makes_room():
    err = Terminal()
    output = Output(io.StringIO(), err)

    with output.progress() as report:
        report("loading")
        output.note("by the way")

    assert err.getvalue() == "\r\x1b[Kloading\r\x1b[Knote: by the way\n"


def test_progress_leaves_no_thread():
    output = Output(io.StringIO(), io.StringIO())
    before = threading.active_count()

    with output.progress():
        assert threading.active_count() == before + 1

    assert threading.active_count() == before


def test_text_goes_out_as_it_is():
    out = io.StringIO()

    Output(out, io.StringIO()).text("a\x1b[2J\r\n", dim=True)

    assert out.getvalue() == "a\x1b[2J\r\n"


def test_a_terminal_is_not_steered():
    out = Terminal()

    Output(out, io.StringIO()).text("a\x1b[2J\t\r\n\x9b")

    assert out.getvalue() == "a\\x1b[2J\t\\x0d\n\\x9b"


def test_a_note_begins_on_a_line_of_its_own():
    screen = Terminal()
    output = Output(screen, screen)

    output.text("half")
    output.note("why")
    output.text("whole\n")
    output.note("why")

    assert screen.getvalue() == "half\nnote: why\nwhole\nnote: why\n"


def test_json_is_one_ascii_line():
    out = io.StringIO()

    Output(out, io.StringIO()).json({"text": "é\ud800"})

    assert out.getvalue() == '{"text": "\\u00e9\\ud800"}\n'
    assert json.loads(out.getvalue()) == {"text": "é\ud800"}


def test_json_holds_no_nan():
    with pytest.raises(ValueError, match="not JSON compliant"):
        Output(io.StringIO(), None).json({"rate": float("nan")})


def test_an_error_survives_a_broken_stderr():
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Output(io.StringIO(), Broken()).error("why")
