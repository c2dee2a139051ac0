"""What a model is made of and what it needs, from headers alone: the `plan` command's content."""

import dataclasses
from typing import Any

from strata_jax.config import MOST_DRAFTS, KvType, ModelConfig
from strata_jax.errors import UsageError
from strata_jax.weights.gguf_header import TensorInfo
from strata_jax.weights.pack import Pack
from strata_jax.weights.tensor_names import name_groups, split_block

DEFAULT_CONTEXT = 8192
TIERS = ("experts", "ngram", "dense", "embedding", "draft", "unused")
_STATE_BYTES = 4  # the delta rule's state and the convolutions' tails are float32 everywhere
_INDEX_BYTES = 4  # so are the indexer's keys
_KV_BYTES = {"fp16": 2, "int8": 1, "f32": 4}
_SCALE_VALUES, _SCALE_BYTES = 64, 4  # of int8 caches: ops/cells.py


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanTensor:
    """One tensor of the files."""

    name: str
    type: str
    shape: tuple[int, ...]
    """ggml order."""
    bytes: int
    tier: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanTier:
    """All tensors that share a budget."""

    name: str
    num_tensors: int
    bytes: int
    bytes_by_type: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of a model and of what it keeps while it runs. All bytes exact, nothing measured."""

    paths: tuple[str, ...]
    file_bytes: int
    config: ModelConfig
    tensors: tuple[PlanTensor, ...]
    tiers: tuple[PlanTier, ...]
    """In the order of `TIERS`, empty ones included; "unused" is what the model does not read."""
    expert_bytes: int
    """Largest single expert: its gate, up and down rows."""
    max_context: int
    kv: KvType
    """How keys and values are cached."""
    kv_bytes: int
    """Keys and values of the trunk's attention and indexer for `max_context` tokens."""
    state_bytes: int
    """Recurrent state: delta nets, convolutions, n-gram window."""
    warnings: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors the model reads."""
        return sum(tier.bytes for tier in self.tiers if tier.name != "unused")

    def to_json(self) -> dict[str, Any]:
        """The plan in lists, dicts, strings and numbers."""
        plan = dataclasses.asdict(self)
        return {**plan, "weight_bytes": self.weight_bytes}

    def table(self) -> str:
        """The plan for people: tiers, then tensors with blocks of one kind on one line."""
        return "\n".join([*self._summary(), "", *self._tensor_lines(), *self.warnings])

    def _summary(self) -> list[str]:
        sizes = self.config
        first, *others = self.paths
        more = f" and {len(others)} more" if others else ""
        lines = [
            f"{first}{more}: {_size(self.file_bytes).strip()}",
            f"{sizes.num_layers} layers, {sizes.num_experts} experts "
            f"({sizes.num_experts_active} active, up to {self.expert_bytes} bytes each), "
            f"{sizes.num_draft_layers} draft layers, vocabulary {sizes.vocab_size}",
            "",
        ]
        for tier in self.tiers:
            if tier.num_tensors:
                kinds = ", ".join(f"{kind} {_size(n).strip()}" for kind, n in _by_size(tier))
                lines.append(
                    f"{tier.name:<10} {_size(tier.bytes)}  {tier.num_tensors:>5} tensors  {kinds}"
                )
        lines.append(f"{'kv':<10} {_size(self.kv_bytes)}  for {self.max_context} tokens, {self.kv}")
        lines.append(f"{'state':<10} {_size(self.state_bytes)}")
        total = self.weight_bytes + self.kv_bytes + self.state_bytes
        lines.append(f"{'total':<10} {_size(total)}")
        return lines

    def _tensor_lines(self) -> list[str]:
        alike: dict[tuple[str, str, tuple[int, ...]], dict[str, int]] = {}
        for tensor in self.tensors:
            key = (tensor.tier, tensor.type, tensor.shape)
            alike.setdefault(key, {})[tensor.name] = tensor.bytes
        lines = []
        for tier in TIERS:
            for (of_tier, kind, shape), sizes in alike.items():
                if of_tier == tier:
                    for group, names in name_groups(sizes).items():
                        total = _size(sum(sizes[name] for name in names))
                        lines.append(f"{tier:<10} {total}  {kind:<8} {group} {list(shape)}")
        return lines


def make_plan(pack: Pack, max_context: int | None, kv: KvType = "fp16") -> Plan:
    """Adds up what a model needs, without reading a weight.

    Args:
        pack: the opened model.
        max_context: tokens of one conversation; None for the smaller of the file's and 8192.
        kv: how keys and values are cached.

    Raises:
        UsageError: if `max_context` is below 1.
    """
    config, warnings = pack.config, pack.warnings
    if max_context is None:
        max_context = min(config.context_length, DEFAULT_CONTEXT)
    if max_context < 1:
        raise UsageError(f"plan: max_context is {max_context}, at least 1 expected")
    if max_context > config.context_length:
        warnings += (
            f"plan: {max_context} tokens of context are more than the {config.context_length} the "
            "model was made for",
        )
    tensors = tuple(_plan_tensor(pack, info) for info in pack.file.tensors.values())
    return Plan(
        paths=pack.file.paths,
        file_bytes=sum(pack.file.sizes),
        config=config,
        tensors=tensors,
        tiers=tuple(_plan_tier(name, tensors) for name in TIERS),
        expert_bytes=max(expert_bytes_by_layer(pack)),
        max_context=max_context,
        kv=kv,
        kv_bytes=kv_bytes_per_token(config, kv) * max_context,
        state_bytes=state_bytes(config),
        warnings=warnings,
    )


def kv_bytes_per_token(config: ModelConfig, kv: KvType) -> int:
    """Bytes that one token adds to the caches of all trunk layers."""
    return config.layer_kinds.count("attention") * cell_bytes(config, kv)


def kv_value_bytes(kv: KvType) -> int:
    """Bytes of one value of a key."""
    return _KV_BYTES[kv]


def cell_bytes(config: ModelConfig, kv: KvType) -> int:
    """Bytes of one token in one attention layer.

    Keys and values; with sparse attention also the indexer's raw key and a share of its block's pooled key
    (rounded up to whole tokens).
    """
    head_bytes = config.head_dim * _KV_BYTES[kv]
    if kv == "int8":
        head_bytes += -(-config.head_dim // _SCALE_VALUES) * _SCALE_BYTES
    size = 2 * config.num_kv_heads * head_bytes
    if config.index_budget:
        index_values = config.index_dim + -(-config.index_dim // config.index_ratio)
        size += index_values * _INDEX_BYTES
    return size


def state_bytes(config: ModelConfig) -> int:
    """Bytes of the state that does not grow with the conversation."""
    dim, heads = config.gdn_head_dim, config.gdn_value_heads
    channels = 2 * config.gdn_key_heads * dim + heads * dim
    values = heads * dim * dim + (config.conv_kernel - 1) * channels
    values += MOST_DRAFTS * (channels + 2 * heads)
    values *= config.layer_kinds.count("linear")
    if config.ngram is not None:
        tail = (config.ngram.conv_kernel - 1) * config.ngram.ngram_size + MOST_DRAFTS
        values += tail * config.num_streams * config.hidden
        values += config.ngram.ngram_size - 1 + MOST_DRAFTS
    return values * _STATE_BYTES


def _plan_tensor(pack: Pack, info: TensorInfo) -> PlanTensor:
    tier = pack.specs[info.name].tier if info.name in pack.specs else "unused"
    return PlanTensor(
        name=info.name, type=info.type.name, shape=info.shape, bytes=info.nbytes, tier=tier
    )


def _plan_tier(name: str, tensors: tuple[PlanTensor, ...]) -> PlanTier:
    members = [tensor for tensor in tensors if tensor.tier == name]
    by_type: dict[str, int] = {}
    for tensor in members:
        by_type[tensor.type] = by_type.get(tensor.type, 0) + tensor.bytes
    total = sum(by_type.values())
    return PlanTier(name=name, num_tensors=len(members), bytes=total, bytes_by_type=by_type)


def expert_bytes_by_layer(pack: Pack) -> tuple[int, ...]:
    """Bytes of one expert, its gate, up and down rows, in each layer; draft layers come last."""
    layers = [0] * (pack.config.num_layers + pack.config.num_draft_layers)
    for name in pack.specs:
        split = split_block(name)
        if split is not None and "_exps." in split[1]:
            layers[split[0]] += pack.tensor(name).nbytes // pack.config.num_experts
    return tuple(layers)


def _by_size(tier: PlanTier) -> list[tuple[str, int]]:
    return sorted(tier.bytes_by_type.items(), key=lambda item: -item[1])


def _size(count: int) -> str:
    """Ten characters: a number and its binary unit."""
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:6.0f} {unit:<3}" if unit == "B" else f"{value:6.1f} {unit}"
