"""The n-gram embedding's settings, and proof that no hash can leave the table."""

from strata_jax.config import ModelConfig, NgramConfig
from strata_jax.errors import BadFileError
from strata_jax.weights.gguf import GgufFile
from strata_jax.weights.meta_reader import PREFIX, MetaReader

TABLE = "per_layer_token_embd.weight"
MAX_ROWS = 1 << 31
_UINT64 = (1 << 64) - 1


def read_ngram(meta: MetaReader, file: GgufFile, config: ModelConfig) -> NgramConfig | None:
    """Reads the `ple.*` keys; None if the file has neither them nor the table.

    Args:
        meta: the file's metadata.
        file: for the table's size.
        config: everything else about the model.

    Raises:
        BadFileError: for missing or wrong values; for a head whose rows are not in the table or do
            not follow those of the head before, with the head's number; for multipliers whose
            products leave 63 bits.
    """
    if TABLE not in file.tensors:
        signs = [key for key in meta.metadata if key.startswith(f"{PREFIX}ple.")]
        signs += [name for name in file.tensors if ".ple_" in name]
        if signs:
            raise BadFileError(f"{meta.path}: tensor {TABLE} is missing, but {signs[0]} is there")
        return None
    ngram_size = meta.integer("ple.ngram_size", 2, 8)
    heads_per_ngram = meta.integer("ple.heads_per_ngram", 1, 64)
    num_heads = (ngram_size - 1) * heads_per_ngram
    row_width = meta.integer("embedding_length_per_layer_input", 1, config.hidden)
    if row_width * num_heads != config.hidden:
        raise meta.error(
            "embedding_length_per_layer_input",
            f"{num_heads} heads that make up the hidden width {config.hidden}",
        )
    table = file.tensors[TABLE]
    num_rows = table.num_elements // table.shape[0]
    offsets, sizes = _head_rows(meta, num_heads, num_rows)
    last_id = config.vocab_size - 1
    eos_id = meta.integer("ple.eos_token_id", 0, last_id)
    return NgramConfig(
        layer=_layer(meta, config),
        ngram_size=ngram_size,
        heads_per_ngram=heads_per_ngram,
        conv_kernel=meta.integer("ple.conv_kernel", 2, 64),
        eos_id=eos_id,
        image_id=meta.integer("ple.image_token_id", 0, last_id, default=eos_id),
        row_width=row_width,
        num_rows=num_rows,
        multipliers=_multipliers(meta, ngram_size, last_id),
        head_offsets=offsets,
        head_sizes=sizes,
    )


def _layer(meta: MetaReader, config: ModelConfig) -> int:
    (layer,) = meta.integers("ple.layers", (1,), 0, config.num_layers - 1)
    if config.layer_kinds[layer] != "linear":
        raise meta.error("ple.layers", "a linear layer")
    return layer


def _multipliers(meta: MetaReader, ngram_size: int, last_id: int) -> tuple[int, ...]:
    values = meta.integers("ple.layer_multipliers", (ngram_size,), 1, _UINT64)
    for value in values:
        if value % 2 == 0 or value * last_id >= 1 << 63:
            raise meta.error(
                "ple.layer_multipliers", f"odd numbers whose product with {last_id} is under 2^63"
            )
    return values


def _head_rows(
    meta: MetaReader, num_heads: int, num_rows: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if num_rows >= MAX_ROWS:
        raise BadFileError(f"{meta.path}: tensor {TABLE} has {num_rows} rows, under 2^31 expected")
    offsets = meta.integers("ple.head_offsets", (num_heads,), 0, _UINT64)
    sizes = meta.integers("ple.head_vocab_sizes", (num_heads,), 0, _UINT64)
    due = 0
    for head, (offset, size) in enumerate(zip(offsets, sizes)):
        if size == 0 or offset + size > num_rows:
            raise BadFileError(
                f"{meta.path}: n-gram head {head} has {size} rows from row {offset}, at least 1 "
                f"within the {num_rows} rows of {TABLE} expected"
            )
        if offset != due:  # offsets are running sums of the sizes
            what = "overlaps" if offset < due else "leaves a gap after"
            raise BadFileError(
                f"{meta.path}: n-gram head {head} starts at row {offset} and {what} the heads "
                f"before it, row {due} expected"
            )
        due += size
    return offsets, sizes
