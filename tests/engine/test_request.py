"""What a caller may ask for."""

import dataclasses
import subprocess
import sys

import pytest

from strata_jax.engine.request import Request, SamplingSettings
from strata_jax.errors import UsageError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("top_k", -1),
        ("top_p", -0.5),
        ("top_p", 1.5),
        ("top_p", NAN),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", NAN),
        ("presence_penalty", INF),
        ("frequency_penalty", -1001.0),
    ],
)
def test_a_setting_out_of_range_is_a_usage_error_that_names_it(setting, value):
    with pytest.raises(UsageError, match=f"{setting}: .*expected"):
        SamplingSettings(**{setting: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_k": 100_000},
        {"top_p": 0.0},
        {"top_p": 1.0},
        {"min_p": 1.0},
        {"seed": 2**64 - 1},
        {"presence_penalty": -2.0},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(settings):
    assert dataclasses.asdict(SamplingSettings(**settings)).items() >= settings.items()


def test_a_files_recommendations_are_followed_where_it_has_them():
    metadata = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.1,
        "general.name": "x",
    }

    expected = SamplingSettings(temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert SamplingSettings.from_metadata(metadata) == expected


def test_without_recommendations_everything_is_neutral():
    assert SamplingSettings.from_metadata({}) == SamplingSettings()


def test_a_recommendation_out_of_range_is_an_error():
    with pytest.raises(UsageError, match="top_p"):
        SamplingSettings.from_metadata({"general.sampling.top_p": 7.0})


def test_requests_and_settings_cannot_be_changed():
    request = Request(ids=(1,), settings=SamplingSettings(), max_tokens=1)

    with pytest.raises(dataclasses.FrozenInstanceError):
        request.max_tokens = 2  # type: ignore[misc]


def test_it_is_known_without_jax():
    code = "import sys, strata_jax.engine.request, strata_jax.engine.sampling; print('jax' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
