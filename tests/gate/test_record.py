import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from strata_jax.errors import UsageError
from strata_jax.gate.judge import run_comparison
from strata_jax.gate.record import ids_hash, make_record, native_library, write_record
from tests.gate.gates import HASH, job, threads_comparison


def _record(**scenario: Any) -> dict:
    outcome = run_comparison(threads_comparison(1, 2), job(**scenario), lambda _: None)
    return make_record("threads", [outcome], began=0.0, library=native_library())


def test_holds_what_a_second_run_is_compared_with():
    record = json.loads(json.dumps(_record(), allow_nan=False))

    assert (record["format"], record["verdict"], record["exit_code"]) == (
        "strata-gate-1",
        "identical",
        0,
    )
    assert record["began"] == "1970-01-01T00:00:00Z"
    assert record["versions"] == {"strata_jax": "0", "numpy": "0"}
    comparison = record["comparisons"][0]
    assert comparison["model"]["hash"] == HASH
    assert comparison["promise"]["contract"] == "T"
    assert comparison["may_differ"] == ["threads"]
    assert len(comparison["checked"]) == 3
    assert [prompt["tokens"] for prompt in comparison["prompts"]] == [3, 2]
    assert comparison["prompts"][0]["ids_sha256"] == ids_hash([5, 6, 7])


def test_claims_no_logits_where_none_were_asked_for():
    alone = dataclasses.replace(threads_comparison(1, 2), ids_only=True)

    outcome = run_comparison(alone, job(), lambda _: None)

    record = make_record("threads", [outcome], began=0.0, library=native_library())
    assert record["comparisons"][0]["checked"] == ["generated ids, one by one", "reasons to end"]


def test_holds_each_sides_flags_process_counters_and_answers():
    side = _record()["comparisons"][0]["sides"][1]

    assert side["flags"]["threads"] == "2"
    assert side["command"].startswith("strata-jax generate --model=/models/fake.gguf")
    assert side["process"]["pid"] > 0
    assert side["counters"]["entries_host"] == 200
    assert side["exercised"][0] == {"required": "entries_host > 0", "seen": 200, "holds": True}
    assert side["shares"]["host"] == 1
    assert side["notes"] == ["note: fake"]
    answer = side["answers"][0]
    assert answer["ids_sha256"] == ids_hash(answer["ids"])
    assert answer["logits"]["positions"] == 6
    assert answer["tiers"]["entries_host"] == 100
    assert answer["timings"] == {"load_s": 0.5}
    assert "text" not in answer


def test_holds_the_first_difference():
    record = _record(when={"threads": "2"}, wrong_logit=[4, 9])

    assert (record["verdict"], record["exit_code"]) == ("differs", 1)
    found = record["comparisons"][0]["sides"][1]["differences"][0]
    assert (found["prompt"], found["logits"]["position"], found["logits"]["token_id"]) == (
        "first",
        4,
        9,
    )
    assert found["logits"]["reference"] == {"text": "209.0", "bits": "0x43510000"}


def test_holds_a_run_that_failed_and_what_was_not_run():
    comparison = _record(die=1)["comparisons"][0]

    assert comparison["verdict"] == "failed"
    assert "died" in comparison["sides"][0]["failure"]
    assert comparison["sides"][0]["answers"] == []
    assert comparison["not_run"] == ["2 threads"]


def test_ids_have_one_hash():
    assert ids_hash([1]) == hashlib.sha256(b"\x01" + bytes(7)).hexdigest()
    assert ids_hash([]) == hashlib.sha256(b"").hexdigest()


def test_names_the_native_library():
    found = native_library()

    assert found["file"] is not None
    assert "_native" in found["file"]
    content = Path(found["file"]).read_bytes()
    assert found["sha256"] == hashlib.sha256(content).hexdigest()


def test_refuses_a_library_that_was_rebuilt_meanwhile():
    outcome = run_comparison(threads_comparison(1, 2), job(), lambda _: None)

    with pytest.raises(UsageError, match="rebuilt while the gate ran"):
        make_record("threads", [outcome], 0.0, native_library() | {"sha256": "0"})


def test_is_written_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "gate.json"
    write_record({"a": 1}, path)

    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="JSON"):
        write_record({"a": float("nan")}, path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_record({}, tmp_path / "folder")
    assert json.loads(path.read_text()) == {"a": 1}
    assert {each.name for each in tmp_path.iterdir()} == {"gate.json", "folder"}
