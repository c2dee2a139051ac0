"""What a gate needs to know of a model before anything runs: sizes, from headers alone."""

import dataclasses

from strata_jax.weights.pack import Pack


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of one model file."""

    path: str
    file_bytes: int
    hash: str
    """Of its content (`Pack.file_hash`)."""
    layers: int
    experts: int
    """Routed experts of a layer."""
    vocab_size: int
    index_budget: int
    """Tokens a query may attend to beside the newest; 0 = all."""
    context_length: int
    has_ngram_table: bool

    @property
    def total_experts(self) -> int:
        """Experts of the trunk, over all layers."""
        return self.layers * self.experts

    @classmethod
    def of(cls, pack: Pack) -> "ModelFacts":
        """The facts of an open pack."""
        config = pack.config
        return cls(
            path=str(pack.file.paths[0]),
            file_bytes=sum(pack.file.sizes),
            hash=pack.file_hash(),
            layers=config.num_layers,
            experts=config.num_experts,
            vocab_size=config.vocab_size,
            index_budget=config.index_budget,
            context_length=config.context_length,
            has_ngram_table=config.ngram is not None,
        )
