import dataclasses
import json
import subprocess
import sys

import pytest

from strata_jax.config import KvType
from strata_jax.errors import UsageError
from strata_jax.weights.pack import open_pack
from strata_jax.weights.plan import TIERS, kv_bytes_per_token, make_plan, state_bytes
from tests.gguf_content import Sizes
from tests.gguf_maker import REAL, REAL_TYPES, make_model
from tests.gguf_writer import Tensor


@pytest.fixture
def plan(tmp_path):
    def made(*args, max_context=None, kv: KvType = "fp16", **kwargs):
        path = make_model(tmp_path / "f.gguf", *args, **{"sparse": True, **kwargs}).path
        with open_pack(path) as pack:
            return make_plan(pack, max_context, kv)

    return made


def test_counts_every_byte_once(plan):
    result = plan(types={"*_exps*": 8}, extra=[Tensor("more", (4,), 0, 16)])

    assert tuple(tier.name for tier in result.tiers) == TIERS
    assert sum(tier.bytes for tier in result.tiers) == sum(t.bytes for t in result.tensors)
    assert sum(tier.num_tensors for tier in result.tiers) == len(result.tensors)
    by_name = {tier.name: tier for tier in result.tiers}
    assert by_name["experts"].bytes == 4 * 4 * 3 * 64 * 64 // 32 * 34
    assert by_name["experts"].bytes_by_type == {"Q8_0": by_name["experts"].bytes}
    assert by_name["ngram"].num_tensors == 1
    assert by_name["embedding"].bytes == 2 * 64 * 512 * 4
    assert by_name["unused"].bytes == 16
    assert result.weight_bytes == sum(t.bytes for t in result.tensors) - 16


def test_gives_the_size_of_one_expert(plan):
    assert plan(types={"*_exps*": 8}).expert_bytes == 3 * 64 * 64 // 32 * 34
    assert plan(fused=True).expert_bytes == 3 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("length", "asked", "context"), [(512, None, 512), (65536, None, 8192), (512, 100, 100)]
)
def test_plans_for_a_context(plan, length, asked, context):
    result = plan(Sizes(context=length), max_context=asked)

    assert result.max_context == context
    # One attention layer: keys and values of 2 heads x 32, index key 32, pooled key 32 / 4.
    assert result.kv_bytes == context * (2 * 2 * 32 * 2 + (32 + 8) * 4)


@pytest.mark.parametrize(("kv", "head"), [("fp16", 32 * 2), ("int8", 32 + 4), ("f32", 32 * 4)])
def test_plans_for_a_type_of_cache(plan, kv, head):
    result = plan(max_context=100, kv=kv)

    assert result.kv_bytes == 100 * (2 * 2 * head + (32 + 8) * 4)
    assert result.to_json()["kv"] == kv
    assert f"for 100 tokens, {kv}" in result.table()


def test_keeps_a_longer_context_with_a_line(plan):
    result = plan(max_context=1000)

    assert result.max_context == 1000
    assert "1000 tokens of context are more than the 512" in result.warnings[0]


def test_refuses_no_context(plan):
    with pytest.raises(UsageError, match="max_context is 0, at least 1"):
        plan(max_context=0)


def test_adds_up_the_state(plan):
    config = plan().config

    # Three linear layers: 4 heads x 32 x 32, 3 inputs of 256 channels; 9 of 4 x 64, 2 ids.
    assert state_bytes(config) == 4 * (
        3 * (4 * 32 * 32 + 3 * 256 + 7 * (256 + 8)) + 16 * 256 + 2 + 7
    )


def test_keeps_no_index_keys_without_sparse_attention(plan):
    config = dataclasses.replace(plan().config, index_budget=0)

    assert kv_bytes_per_token(config, "fp16") == 2 * 2 * 32 * 2


def test_is_json_and_a_table(plan):
    result = plan(extra=[Tensor("more", (4,), 0, 16)])

    loaded = json.loads(json.dumps(result.to_json()))
    assert loaded["weight_bytes"] == result.weight_bytes
    assert loaded["tensors"][0]["name"] == "token_embd.weight"
    assert loaded["config"]["num_layers"] == 4
    lines = result.table().splitlines()
    assert any(line.startswith("experts ") and "12 tensors" in line for line in lines)
    assert any("blk.{0-3}.ffn_up_exps.weight [64, 64, 4]" in line for line in lines)
    assert any(line.startswith("kv ") for line in lines)
    assert lines[-1].endswith("not used: more")
    assert max(map(len, lines)) < 160


MEASURE = """
import json, resource, sys, time
from strata_jax.weights.pack import open_pack
from strata_jax.weights.plan import make_plan
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
with open_pack(sys.argv[1]) as pack:
    plan = make_plan(pack, None)
    text = json.dumps(plan.to_json()) + plan.table()
took_s = time.perf_counter() - start
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
tiers = {tier.name: tier.bytes for tier in plan.tiers}
print(json.dumps([took_s, grown, len(plan.tensors), tiers, list(plan.warnings), "jax" in sys.modules]))
"""


def test_plans_the_released_model_in_time_and_memory(tmp_path):
    made = make_model(tmp_path / "f.gguf", REAL, types=REAL_TYPES, sparse=True)

    answer = subprocess.run(
        [sys.executable, "-c", MEASURE, str(made.path)], capture_output=True, check=True, text=True
    )
    took_s, grown, num_tensors, tiers, warnings, jax_loaded = json.loads(answer.stdout)

    assert took_s < 2
    assert grown < 100 << 20
    assert not jax_loaded
    assert warnings == []
    assert num_tensors == 1256
    assert tiers["ngram"] == 320_001_536 * 90
    assert tiers["experts"] == 48 * 512 * (2 * 2560 * 640 // 256 * 110 + 2560 * 640 // 32 * 18)
