"""A process that answers like `strata_jax.cli.gate_worker`, without a model.

`python fake_worker.py SCENARIO`: SCENARIO is a JSON object. Its "when" names flags and values that a
request must have for its other keys to take effect; each of them is a fault or a way to behave. Nothing
but the standard library is imported: the tests start many of these.
"""

import array
import json
import math
import os
import struct
import sys
import time
from pathlib import Path

VOCABULARY = 50
VERSIONS = {"strata_jax": "0", "numpy": "0"}


def answer(flags: dict[str, str], faults: dict) -> dict:
    prompt = [int(token) for token in flags["prompt_ids"].split(",")]
    count = int(flags["max_tokens"])
    ids = [(7 * index + len(prompt)) % VOCABULARY for index in range(count)]
    positions = len(prompt) + count - 1
    rows = [
        [float(row * VOCABULARY + column) for column in range(VOCABULARY)]
        for row in range(positions)
    ]
    ids, rows = spoil(ids, rows, len(prompt), faults)
    if "logits_out" in flags and not faults.get("no_logits"):
        write_npy(Path(flags["logits_out"]), rows, faults.get("type", "f"))
    return {
        "ids": ids,
        "text": None,
        "finish_reason": faults.get("finish_reason", "length"),
        "prompt_tokens": len(prompt) + faults.get("longer_prompt", 0),
        "timings": {"load_s": 0.5},
        "model": {"file": flags["model"], "hash": faults.get("hash", HASH)},
        "versions": VERSIONS | faults.get("versions", {}),
        "tiers": counters(flags) | faults.get("tiers", {}),
        "plan": {
            "chunk_tiles": int(flags.get("prefill", 1)),
            "peer_part": {"attention_rows": int(2048 * float(flags.get("peer_attention", 0)))},
        },
        "ngram": {"mode": faults.get("mode", flags.get("ple_io", "direct"))},
        "drafts": faults.get("drafts", drafts(flags)),
        "windows": faults.get("windows", {"1": count - 1, flags.get("spec", "8"): 2}),
    }


def spoil(ids: list[int], rows: list[list[float]], prompt_tokens: int, faults: dict):
    if "wrong_id" in faults:
        ids[faults["wrong_id"]] += 1
    if "shorter" in faults:
        ids, rows = ids[: -faults["shorter"]], rows[: -faults["shorter"]]
    if "wrong_logit" in faults:
        row, column = faults["wrong_logit"]
        bits = struct.unpack("<I", struct.pack("<f", rows[row][column]))[0]
        rows[row][column] = struct.unpack("<f", struct.pack("<I", bits + 1))[0]
    if faults.get("all_nan"):
        rows[prompt_tokens] = [math.nan] * VOCABULARY
    if "width" in faults:
        rows = [row[: faults["width"]] for row in rows]
    return ids, rows


def write_npy(path: Path, rows: list[list[float]], kind: str) -> None:
    """Writes .npy version 1: a magic, the header's length, the header padded to 64, the values."""
    shape = (len(rows), len(rows[0]))
    descr = {"f": "<f4", "d": "<f8"}[kind]
    header = repr({"descr": descr, "fortran_order": False, "shape": shape})
    header += " " * (-(len(header) + 11) % 64) + "\n"
    values = array.array(kind, [value for row in rows for value in row])
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header))
    path.write_bytes(start + header.encode() + values.tobytes())


def counters(flags: dict[str, str]) -> dict:
    """Roughly what a small model's tiers would do."""
    cache, peer = int(flags.get("expert_cache", 0)), "peer_device" in flags
    moves = cache > 0 and flags.get("adapt_swaps") != "0"
    full = cache >= 128
    share = float(flags.get("pcie_frac", 0))
    missed = 0 if full else 100
    tiles = missed // 10 if cache else 0  # streamed whatever the share is
    from_file = missed // 2 if "resident_budget_gib" in flags else 0
    return {
        "entries_primary": 60 if cache else 0,
        "entries_peer": 20 if peer else 0,
        "entries_stream": int(missed * share) + tiles,
        "entries_stream_frac": int(missed * share),
        "entries_host": missed - int(missed * share) - from_file,
        "entries_file": from_file,
        "peer_experts_streamed": int(10 * float(flags.get("peer_stream", 0))),
        "swaps_primary": 3 if moves and not full else 0,
        "swaps_peer": 2 if moves and peer else 0,
    }


def drafts(flags: dict[str, str]) -> dict | None:
    """Ten drafts, of which as many come true as the script says, if it begins as the answers do."""
    if "draft_script" not in flags:
        return None
    percent, path = flags["draft_script"].split(":", 1)
    known = json.loads(Path(path).read_text())
    prompt = [int(token) for token in flags["prompt_ids"].split(",")]
    looked_at = 10 if any(text[: len(prompt)] == prompt for text in known) else 0
    accepted = looked_at * int(percent) // 100
    return {"accepted": accepted, "steps": [{"looked_at": looked_at, "accepted": accepted}]}


def reply(flags: dict[str, str], faults: dict) -> dict:
    if "code" in faults:
        return {"code": faults["code"], "result": None, "lines": ["strata-jax: no such flag"]}
    result = answer(flags, faults)
    for key in faults.get("without", ()):
        del result[key]
    return {"code": 0, "result": result, "lines": ["note: fake"]}


def serve(scenario: dict) -> None:
    faults: dict = {}
    for number, line in enumerate(sys.stdin):
        flags = dict(arg[2:].split("=", 1) for arg in json.loads(line)["args"])
        meant = all(flags.get(name) == value for name, value in scenario.get("when", {}).items())
        faults = scenario if meant and number >= scenario.get("from_request", 0) else {}
        if "die" in faults:
            sys.stderr.write("worker: out of luck\n")
            sys.stderr.flush()
            os._exit(faults["die"])
        if "touch" in faults:
            Path(faults["touch"]).touch()
        time.sleep(faults.get("hang_s", 0))
        said = faults["say"] if "say" in faults else json.dumps(reply(flags, faults))
        sys.stdout.write(said + "\n")
        sys.stdout.flush()
    if "end_by" in faults:
        os.kill(os.getpid(), faults["end_by"])
    time.sleep(faults.get("end_s", 0))


if __name__ == "__main__":
    SCENARIO = json.loads(sys.argv[1])
    HASH = SCENARIO["model_hash"]
    serve(SCENARIO)
