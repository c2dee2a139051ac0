import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from strata_jax.cli.interrupts import EXIT_CODE, Interrupts


def _interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # Python runs the handler between two byte codes


def test_raises_and_remembers():
    with Interrupts(die=lambda _: None) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            _interrupt()

        assert interrupts.fatal.is_set()


def test_calls_the_canceller_first_and_raises_then():
    cancelled = []
    with (
        Interrupts(die=lambda _: None) as interrupts,
        interrupts.cancelling(lambda: cancelled.append(True)),
    ):
        _interrupt()
        assert cancelled == [True]
        assert not interrupts.fatal.is_set()

        with pytest.raises(KeyboardInterrupt):
            _interrupt()


def test_a_harmless_one_only_raises():
    died = []
    with Interrupts(die=died.append) as interrupts:
        with interrupts.harmless(), pytest.raises(KeyboardInterrupt):
            _interrupt()

        assert not interrupts.fatal.is_set()
    assert died == []


def test_repeats_one_that_its_handler_has_not_heard_of():
    with Interrupts(die=lambda _: None) as interrupts, interrupts.harmless():
        # What the system's handler does; Python's is left out.
        os.write(interrupts._write_end, bytes([signal.SIGINT]))

        with pytest.raises(KeyboardInterrupt):
            time.sleep(5)


def test_puts_back_what_was_there():
    before = signal.getsignal(signal.SIGINT)

    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not before

    assert signal.getsignal(signal.SIGINT) is before


def test_leaves_other_threads_alone():
    problems = []

    def use():
        try:
            with Interrupts():
                pass
        except ValueError as error:
            problems.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()

    assert problems == []


@pytest.mark.parametrize(
    ("script", "phase"),
    [("slow_load", "loading"), ("busy_load", "compiling"), ("endless", "so on and so on")],
)
def test_ends_every_phase_within_two_seconds(script: str, phase: str):
    command = [sys.executable, "-m", "tests.cli.fake_engine", script, "generate", "--prompt=Hi"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        shown = b""
        while phase.encode() not in shown:
            piece = os.read(process.stdout.fileno(), 1000)
            assert piece, shown
            shown += piece
        children = psutil.Process(process.pid).children(recursive=True)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()

        assert process.wait(timeout=5) == EXIT_CODE
        assert time.monotonic() - begin < 2.0
        assert rest.decode().endswith("strata-jax: interrupted\n")
        assert "Traceback" not in rest.decode()
        assert children == []
