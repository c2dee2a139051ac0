"""How much work a command is, whatever else the machine does: a wall clock fails under load."""

import resource
import subprocess


def cpu_seconds(command: list[str]) -> tuple[float, subprocess.CompletedProcess[bytes]]:
    """Runs a command; its CPU time, user and system, and what came of it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return used, done
