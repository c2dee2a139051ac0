from strata_jax.cli.files import embedded_model
from strata_jax.gate.facts import ModelFacts
from strata_jax.weights.pack import open_pack


def test_are_those_of_the_headers():
    with open_pack(embedded_model()) as pack:
        facts = ModelFacts.of(pack)

        assert facts.hash == pack.file_hash()
    assert facts.path == str(embedded_model())
    assert facts.file_bytes == embedded_model().stat().st_size
    assert facts.total_experts == facts.layers * facts.experts == 128
    assert (facts.vocab_size, facts.index_budget, facts.has_ngram_table) == (4096, 256, True)
