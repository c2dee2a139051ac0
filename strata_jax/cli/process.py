"""What this process takes of memory, as the kernel counts it."""

from pathlib import Path

_FIELDS = {
    "anonymous_bytes": "RssAnon",
    "file_bytes": "RssFile",
    "locked_bytes": "VmLck",
    "peak_bytes": "VmHWM",
}


def process_memory(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """Resident bytes by kind: own ones, those of mapped files, locked ones, and the most so far.

    Mapped files grow as they are read and give way to others: only growth of the first is a leak.
    """
    try:
        lines = status.read_text().splitlines()
    except OSError:  # another kernel
        return {}
    fields = [line.split() for line in lines]
    kib = {words[0].rstrip(":"): int(words[1]) for words in fields if words[2:] == ["kB"]}
    return {name: 1024 * kib[key] for name, key in _FIELDS.items() if key in kib}
