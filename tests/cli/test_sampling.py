import pytest
from absl import flags

from strata_jax.cli import flags as cli_flags
from strata_jax.cli import sampling
from strata_jax.errors import BadFileError, UsageError

FILE = {
    "general.sampling.temp": 0.5,
    "general.sampling.top_k": 20,
    "general.sampling.top_p": 0.25,
    "general.sampling.min_p": 0.125,
    "general.sampling.penalty_repeat": 1.5,
}


def _settings(metadata: dict[str, object], *args: str):
    values = flags.FlagValues()
    cli_flags.define_sampling(values)
    values(["test", *args])
    return sampling.settings(values, metadata)


def test_is_neutral_without_recommendations():
    settings = _settings({})

    assert (settings.temperature, settings.top_k, settings.top_p, settings.min_p) == (1, 0, 1, 0)
    assert settings.repetition_penalty == 1
    assert (settings.presence_penalty, settings.frequency_penalty, settings.seed) == (0, 0, 0)


def test_follows_the_file():
    settings = _settings(FILE)

    assert (settings.temperature, settings.top_k, settings.top_p) == (0.5, 20, 0.25)
    assert (settings.min_p, settings.repetition_penalty) == (0.125, 1.5)


def test_flags_overrule_the_file():
    settings = _settings(FILE, "--temperature=0", "--top_k=0", "--seed=7")

    assert (settings.temperature, settings.top_k, settings.top_p) == (0, 0, 0.25)
    assert settings.seed == 7


@pytest.mark.parametrize(
    ("key", "value", "flag"),
    [
        ("temp", "hot", "--temperature"),
        ("temp", float("nan"), "--temperature"),
        ("temp", float("inf"), "--temperature"),
        ("top_k", 20.0, "--top_k"),
        ("top_p", True, "--top_p"),
        ("min_p", (1.0,), "--min_p"),
    ],
)
def test_refuses_a_recommendation_that_is_no_number(key: str, value: object, flag: str):
    with pytest.raises(BadFileError, match=f"general.sampling.{key} is .*; {flag} overrules it"):
        _settings({f"general.sampling.{key}": value})


def test_refuses_a_recommendation_out_of_range():
    with pytest.raises(BadFileError, match=r"general\.sampling"):
        _settings({"general.sampling.temp": -1.0})


@pytest.mark.parametrize("value", [-1.0, "hot"])
def test_a_flag_overrules_a_bad_recommendation(value: object):
    assert _settings({"general.sampling.temp": value}, "--temperature=1").temperature == 1


def test_names_recommendations_that_are_not_followed():
    assert sampling.not_followed(FILE) == ()
    (line,) = sampling.not_followed(FILE | {"general.sampling.mirostat": 2})
    assert "general.sampling.mirostat: the file recommends 2" in line


def test_biases_are_pairs():
    assert _settings({}).logit_bias == ()
    assert _settings({}, "--logit_bias=198:-100,256:1.5").logit_bias == ((198, -100.0), (256, 1.5))


@pytest.mark.parametrize(
    "value", ["", "7", "7:", "a:1", "7:1:2", "7:1,", "7:nan", "7:1,7:2", "-1:2"]
)
def test_refuses_what_is_no_bias(value: str):
    with pytest.raises(UsageError, match="logit_bias"):
        _settings({}, f"--logit_bias={value}")
