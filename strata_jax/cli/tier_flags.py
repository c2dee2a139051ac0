"""Flags of the expert tiers and of the n-gram table, and the settings they make."""

from typing import Any

from absl import flags

from strata_jax.cli.files import output_path, user_path
from strata_jax.cli.flags import AUTO, Number, NumberOrAuto, define_choice, define_number
from strata_jax.config import LOOPBACK, TierSettings, environment_peer_stream

_DEFAULTS = TierSettings()
_PATHS = ("expert_profile", "expert_profile_save")
_NUMBERS = (
    (
        "vram_reserve_mib",
        0,
        "MiB that auto leaves free on the primary; not given, at most an eighth of it",
    ),
    ("adapt_every", 1, "windows from one adaptive round to the next"),
    ("adapt_swaps", 0, "most experts swapped in a round, over all layers; 0 freezes them"),
    (
        "pool_workers",
        0,
        "threads that compute experts in RAM; 0 is on the CPU those of the ops, else one a core but one",
    ),
    ("peer_reserve_mib", 0, "MiB left free on the peer; not given, at most an eighth of it"),
    ("peer_slots", 0, "most experts on the peer; 0 is as many as fit"),
    ("peer_adapt_swaps", -1, "most experts swapped in a round on the peer; -1 is as --adapt_swaps"),
    ("device_memory_mib", 1, "bounds the primary's memory; on the CPU it emulates a device"),
    ("peer_memory_mib", 1, "bounds the peer's memory"),
)
"""Whole numbers: name, least, help. Their defaults are those of the settings."""


class _NumberOrLoopback(Number):
    """Number of a device, or the word for the primary's own."""

    def __init__(self) -> None:
        """See the base class."""
        super().__init__(int, -1)
        self.syntactic_help += f" or {LOOPBACK}"

    def parse(self, argument: Any) -> Any:
        """See the base class."""
        return LOOPBACK if argument == LOOPBACK else super().parse(argument)


def define_tiers(values: flags.FlagValues) -> None:
    """Defines where experts and the n-gram table lie, and how experts move."""
    _define_auto(
        values,
        "expert_cache",
        NumberOrAuto(int, 0),
        "experts on the primary device, counted over all layers; auto is as many as fit, but none "
        "on a CPU without --device_memory_mib; 0 is off",
    )
    flags.DEFINE_boolean(
        "expert_cache_fill_all",
        False,
        "auto goes on behind the experts that the profile ranks",
        flag_values=values,
    )
    for name, text in (
        ("expert_profile", "ranking of the experts for the first fill ('strata-jax profile')"),
        ("expert_profile_save", "file that the ranking learned from this run is written to"),
    ):
        flags.DEFINE_string(name, None, text, flag_values=values)
    for name, least, text in _NUMBERS:
        define_number(values, name, int, text, default=getattr(_DEFAULTS, name), lower=least)
    _define_peer(values)
    define_number(
        values,
        "adapt_decay",
        float,
        "factor on the usage counts after each adaptive round",
        default=_DEFAULTS.adapt_decay,
        lower=0,
        upper=1,
    )
    _define_auto(
        values,
        "pcie_frac",
        NumberOrAuto(float, 0, 1),
        "share of the missed experts that the device computes from host memory; auto is 0 on the CPU, "
        "and measured at start on a GPU",
    )
    _define_auto(
        values,
        "prefill_ring",
        NumberOrAuto(int, 0, 16384),
        "slots on a GPU through which prompts stream the experts that it does not hold; auto is two "
        "layers' worth in at most a sixteenth of its memory; 0 reads them over the link",
    )
    _define_host(values)


def tier_settings(values: flags.FlagValues) -> TierSettings:
    """The settings that the flags make, checked as far as they depend on nothing else.

    Raises:
        UsageError: for flags that contradict each other, by both names, and for a profile that
            could not be saved.
    """
    chosen: dict[str, Any] = {name: values[name].value for name in _names()}
    for name in _names():
        if chosen[name] == AUTO:
            chosen[name] = None
    if values["peer_stream"].using_default_value and chosen["peer_device"] != -1:
        chosen["peer_stream"] = environment_peer_stream()
    for name in _PATHS:
        if chosen[name] is not None:
            path = user_path if name == "expert_profile" else output_path
            chosen[name] = path(name, chosen[name])
    given = frozenset(name for name in _names() if not values[name].using_default_value)
    if not chosen["expert_cache_fill_all"]:
        given -= {"expert_cache_fill_all"}  # asking for nothing needs no effect
    return TierSettings(**chosen, given=given)


def _define_peer(values: flags.FlagValues) -> None:
    flags.DEFINE(
        _NumberOrLoopback(),
        "peer_device",
        -1,
        "second device that holds experts, numbered as nvidia-smi does; loopback is a second store on "
        "the primary's device; on the CPU 1 is emulated; -1 is none",
        values,
        flags.ArgumentSerializer(),
    )
    define_choice(
        values,
        "peer_link",
        [AUTO, "p2p", "host"],
        "how rows reach the peer and come back: from card to card, or through RAM; auto is the first "
        "where the driver allows it",
    )

    _define_auto(
        values,
        "peer_stream",
        NumberOrAuto(float, 0, 1),
        "share of the experts in RAM that the peer streams over its own link in prompts, and computes "
        "beside those it holds (STRATA_PF_PEER_STREAM, too); auto is 0.35 on a second GPU over P2P, and "
        "leaves a loopback peer out of prompts",
    )

    _define_auto(
        values,
        "peer_attention",
        NumberOrAuto(float, 0, 0.5),
        "share of a tile's queries, the last ones, that the peer takes in sparse attention of prompts; "
        "auto is 0.5 on a second GPU over P2P, else 0",
    )


def _define_host(values: flags.FlagValues) -> None:
    define_choice(
        values,
        "ple_io",
        [AUTO, "direct", "mmap", "ram"],
        "how rows of the n-gram table are read: past the page cache, through it, or from RAM where "
        "the whole table is locked; auto is mmap for a table that free memory holds eight times, on a GPU "
        "ram for one that it holds three times, else direct",
    )
    for name, text in (
        ("host_ram_limit_gib", "bounds everything page-locked or copied in RAM"),
        ("resident_budget_gib", "experts kept in RAM; the rest is read from the file when used"),
    ):
        define_number(values, name, float, f"GiB: {text}; what is free if not given", lower=0)


def _define_auto(
    values: flags.FlagValues, name: str, parser: flags.ArgumentParser, text: str
) -> None:
    flags.DEFINE(parser, name, AUTO, text, values, flags.ArgumentSerializer())


def _names() -> tuple[str, ...]:
    names = [name for name, _, _ in _NUMBERS]
    return (
        *names,
        *_PATHS,
        "peer_device",
        "peer_link",
        "peer_stream",
        "peer_attention",
        "expert_cache",
        "expert_cache_fill_all",
        "adapt_decay",
        "pcie_frac",
        "prefill_ring",
        "ple_io",
        "host_ram_limit_gib",
        "resident_budget_gib",
    )
