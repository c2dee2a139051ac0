import io
import time

import pytest
from absl import flags

from strata_jax.cli import chat, conversation
from strata_jax.cli.context import Context
from strata_jax.cli.files import embedded_model
from strata_jax.cli.flags import parse
from strata_jax.cli.interrupts import Interrupts
from strata_jax.cli.output import Output
from strata_jax.engine.options import EngineOptions
from strata_jax.engine.prefill_timing import PrefillTiming
from strata_jax.weights.pack import open_pack
from tests.cli.fake_engine import FakeGeneration, Opener, run
from tests.cli.pseudo_terminal import CTRL_C, CTRL_D, Program

FAKE = "tests.cli.fake_engine"
ANSWER = "I think.</think>\n\nHello there.<|im_end|>"


def _decode(opener: Opener) -> str:
    assert opener.engine is not None
    return opener.engine.decode(opener.request.ids)


def test_answers_every_line_of_a_pipe():
    outcome = run("chat", opener=Opener(ANSWER), stdin=b"Hi\n\nWho are you?\n")

    assert outcome.code == 0
    assert outcome.out == "Hello there.\nHello there.\n"


def test_tells_once_what_cannot_be_written_and_goes_on():
    opener = Opener(ANSWER)
    opener.unsaved = "--expert_profile_save=x: cannot be written"

    outcome = run("chat", opener=opener, stdin=b"Hi\nHi\n")

    assert outcome.code == 1
    assert outcome.out == "Hello there.\nHello there.\n"
    assert outcome.err.count("note: a warning\n") == 1
    assert outcome.err.endswith("strata-jax: --expert_profile_save=x: cannot be written\n")


def test_tells_where_the_time_of_every_prompt_went(monkeypatch: pytest.MonkeyPatch):
    timing = PrefillTiming(
        wall_s=2.0,
        slot_wait_s=0.0,
        experts_streamed=0,
        experts_unrouted=0,
        bytes_streamed=0,
        marks=(),
        peer=None,
    )
    monkeypatch.setattr(FakeGeneration, "prefill_timing", timing)

    outcome = run("chat", "--prefill_timing", opener=Opener(ANSWER), stdin=b"Hi\nHi\n")

    lines = timing.lines()
    assert lines
    assert [outcome.err.count(f"note: {line}\n") for line in lines] == [2] * len(lines)


def test_keeps_the_history():
    opener = Opener(ANSWER)

    run("chat", opener=opener, stdin=b"Hi\nWho are you?\n")

    prompt = _decode(opener)
    assert prompt.index("Hi") < prompt.index("Hello there.") < prompt.index("Who are you?")
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")


def test_reset_forgets_the_history():
    opener = Opener(ANSWER)

    run("chat", opener=opener, stdin=b"Hi\n/reset\nWho are you?\n")

    assert "Hi" not in _decode(opener)


def test_exit_leaves_at_once():
    outcome = run("chat", opener=Opener(ANSWER), stdin=b"/exit\nHi\n")

    assert (outcome.code, outcome.out) == (0, "")


def test_help_names_the_commands():
    outcome = run("chat", stdin=b"/help\n")

    assert "/reset" in outcome.err
    assert "/exit" in outcome.err


def test_an_unknown_command_is_not_sent():
    opener = Opener(ANSWER)

    outcome = run("chat", opener=opener, stdin=b"/rest\nHi\n")

    assert outcome.code == 2
    assert "/rest" in outcome.err
    assert outcome.out == "Hello there.\n"


def test_a_space_makes_a_command_a_message():
    opener = Opener(ANSWER)

    run("chat", opener=opener, stdin=b" /exit\n")

    assert " /exit" in _decode(opener)


def test_a_message_too_long_is_not_added_and_nothing_is_lost():
    opener = Opener(ANSWER)
    lines = b"Hi\n" + b"long " * 100 + b"\nWho are you?\n"

    outcome = run("chat", "--max_context=80", opener=opener, stdin=lines)

    assert outcome.code == 2
    assert "the context holds 80" in outcome.err
    assert outcome.out == "Hello there.\nHello there.\n"
    assert "Hi" in _decode(opener)
    assert "long" not in _decode(opener)


def test_an_answer_takes_what_the_context_leaves():
    opener = Opener(ANSWER)

    run("chat", "--max_context=80", opener=opener, stdin=b"Hi\n")

    assert opener.request.max_tokens == 80 - len(opener.request.ids)


def test_says_that_an_answer_was_cut():
    outcome = run("chat", "--max_tokens=2", opener=Opener(ANSWER), stdin=b"Hi\n")

    assert "--max_tokens or the context" in outcome.err
    assert "only thought" in outcome.err


def test_says_that_an_answer_was_stuck(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeGeneration, "stuck_on", 7)

    outcome = run("chat", "--max_tokens=2", opener=Opener(ANSWER), stdin=b"Hi\n")

    assert "had come to repeat id 7" in outcome.err
    assert "the answer was cut" not in outcome.err


def test_switches_thinking_off():
    opener = Opener("Hello.<|im_end|>")

    outcome = run("chat", "--thinking=off", opener=opener, stdin=b"Hi\n")

    assert _decode(opener).endswith("</think>\n\n")
    assert outcome.out == "Hello.\n"


def test_refuses_an_effort_before_the_model_is_loaded():
    outcome = run("chat", "--effort=high", stdin=b"Hi\n")

    assert outcome.code == 2
    assert "loading" not in outcome.err


def test_refuses_a_line_that_is_no_text():
    outcome = run("chat", stdin=b"Hi\n\xff\n")

    assert outcome.code == 2
    assert "line 2 is not UTF-8" in outcome.err


def test_shows_reasoning_dimmed_at_a_terminal():
    with Program(FAKE, "hello", "chat") as program:
        program.wait_for("> ")
        program.type("Hi\n")
        program.wait_for("Hello there.")
        program.wait_for("> ")
        program.type(CTRL_D)

        assert program.exit_code() == 0
        assert "\x1b[2mI\x1b[22m" in program.raw
        assert "I think.\r\n\r\nHello there.\r\n" in program.plain


def test_ctrl_c_stops_the_answer_and_keeps_the_chat():
    with Program(FAKE, "endless", "chat", "--thinking=off") as program:
        program.wait_for("> ")
        program.type("Hi\n")
        program.wait_for("so on and so on")
        program.type(CTRL_C)
        program.wait_for("stopped", timeout_s=2)
        program.wait_for("> ", timeout_s=2)
        program.type("More\n")
        program.wait_for("so on and so on")
        program.type(CTRL_C)
        program.wait_for("> ", timeout_s=2)
        program.type("/exit\n")

        assert program.exit_code() == 0


def test_ctrl_c_at_the_prompt_keeps_the_chat():
    with Program(FAKE, "hello", "chat") as program:
        program.wait_for("> ")
        program.type("half a line")
        program.wait_for("half a line")
        program.type(CTRL_C)
        program.wait_for("leaves", timeout_s=2)
        program.wait_for("> ", timeout_s=2)
        # Longer than the grace of a fatal interrupt: it must not be one.
        time.sleep(1.2)
        program.type("/exit\n")

        assert program.exit_code() == 0


def test_ctrl_c_stops_a_prompt_where_it_can_go_on_and_keeps_the_message():
    with Program(FAKE, "slow_prompt", "chat", "--thinking=off") as program:
        program.wait_for("> ")
        program.type("Hi\n")
        program.wait_for("(1 s)")
        program.type(CTRL_C)
        program.wait_for("stopping", timeout_s=2)
        program.wait_for("prompt tokens, which are kept", timeout_s=2)
        program.wait_for("an empty line sends it again", timeout_s=2)
        program.wait_for("> ", timeout_s=2)
        program.type("\n")
        program.wait_for("Hello.", timeout_s=2)
        program.wait_for("> ", timeout_s=2)
        program.type("/exit\n")

        assert program.exit_code() == 0


@pytest.mark.parametrize(("kept", "expected"), [(1, "which are kept"), (0, "will be read again")])
def test_says_of_a_stopped_prompt_what_is_kept(kept: int, expected: str):
    opener = Opener("Hello.", read_s=1e-3)
    err = io.StringIO()
    values = flags.FlagValues()
    chat.define(values)
    parse("chat", values, [], {})
    with open_pack(embedded_model()) as pack:
        engine = opener(pack, EngineOptions(), lambda _: None)
        engine.kept = kept
        talk = conversation.Conversation.of(values, pack)
        context = Context(
            output=Output(None, err), interrupts=Interrupts(), stdin=None, open_engine=opener
        )
        stop = conversation._Stop()
        stop()

        begun = conversation.Terminal(context, engine, talk)._begin(talk.request("Hi", 99), stop)

    assert begun is None
    assert expected in err.getvalue()


def test_ctrl_c_before_the_answer_begins_adds_nothing():
    with Program(FAKE, "slow_answer", "chat", "--thinking=off") as program:
        program.wait_for("> ")
        program.type("Hi\n")
        program.wait_for("(1 s)")  # the answer has not begun, nor is there a border before it
        program.type(CTRL_C)
        program.wait_for("the message was not added", timeout_s=2)
        program.wait_for("> ", timeout_s=2)
        program.type("/exit\n")

        assert program.exit_code() == 0
        assert "Late" not in program.raw


def test_a_second_ctrl_c_leaves_where_a_prompt_does_not_stop():
    with Program(FAKE, "stuck_prompt", "chat") as program:
        program.wait_for("> ")
        program.type("Hi\n")
        program.wait_for("(1 s)")
        program.type(CTRL_C)
        program.wait_for("Ctrl-C again leaves", timeout_s=2)
        program.type(CTRL_C)

        assert program.exit_code(timeout_s=2) == 130
        assert program.raw.endswith("strata-jax: interrupted\r\n")
        assert "Traceback" not in program.raw


def test_ctrl_c_while_loading_ends_the_chat():
    with Program(FAKE, "busy_load", "chat") as program:
        program.wait_for("compiling")
        program.type(CTRL_C)

        assert program.exit_code(timeout_s=2) == 130
