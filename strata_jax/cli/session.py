"""From flags to a model that is ready to answer: what `generate` and `chat` have in common."""

import contextlib
import dataclasses
import errno
import importlib.metadata
import os
import platform as machine_facts
from collections.abc import Iterator
from pathlib import Path

from absl import flags

from strata_jax import __version__
from strata_jax.cli import draft_flags, sampling
from strata_jax.cli.context import Context, Engine
from strata_jax.cli.devices import choose_platform, nvidia_devices
from strata_jax.cli.draft_flags import draft_settings
from strata_jax.cli.files import model_path, output_path, user_path
from strata_jax.cli.flags import AUTO
from strata_jax.cli.native import load_native
from strata_jax.cli.output import Output
from strata_jax.cli.tier_flags import tier_settings
from strata_jax.config import (
    Platform,
    TierSettings,
    environment_notes,
    user_cache_dir,
    wants_prefill_timing,
)
from strata_jax.engine.options import EngineOptions
from strata_jax.errors import StrataError, UsageError
from strata_jax.weights.pack import Pack, open_pack
from strata_jax.weights.profile import check_replaceable


@contextlib.contextmanager
def opened_pack(values: flags.FlagValues, output: Output) -> Iterator[Pack]:
    """The model file, its oddities told."""
    with open_pack(model_path(values)) as pack:
        for line in (*pack.warnings, *sampling.not_followed(pack.file.metadata)):
            output.note(line)
        yield pack


def check_platform(
    values: flags.FlagValues, output: Output, *, has_peer: bool | None = None
) -> Platform:
    """Tells where the model will run and which settings decide nothing, before it is opened.

    Args:
        values: what was given.
        output: takes the lines.
        has_peer: whether the model will have one; None: as --peer_device says.

    Raises:
        StrataError: if the platform asked for is not to be had.
    """
    for line in environment_notes(has_peer=has_peer or values.peer_device != -1):
        output.note(line)
    if values.deterministic:
        output.note("--deterministic: always on here")
    choice = choose_platform(values.platform, nvidia_devices())
    if choice.note is not None:
        output.note(choice.note)
    return choice.platform


def engine_options(values: flags.FlagValues, platform: Platform) -> EngineOptions:
    """What the flags of an engine, its drafts and its tiers say.

    Raises:
        UsageError: if one of them is no good by itself, or some contradict each other.
    """
    return EngineOptions(
        max_context=values.max_context,
        threads=values.threads,
        window_rows=values.window_rows,
        kv=values.kv,
        index_budget=values.indexer_budget,
        spec=values.spec,
        spec_min_p=values.spec_min_p,
        suffix_draft=values.suffix_draft,
        draft_script=draft_flags.script(values.draft_script),
        prefill=None if values.prefill == AUTO else values.prefill,
        prefill_timing=values.prefill_timing or wants_prefill_timing(),
        tiers=tier_settings(values),
        mtp=draft_settings(values),
        platform=platform,
        routing_out=output_path("routing_out", values.routing_out),
    )


@contextlib.contextmanager
def running_engine(
    pack: Pack,
    values: flags.FlagValues,
    context: Context,
    platform: Platform,
    all_logits: bool = False,
) -> Iterator[Engine]:
    """The model, loaded, its notes told; closed behind the block.

    Raises:
        StrataError: if it cannot run here or does not fit, or a flag is no good; at the end, if a file
            that was asked for could not be written.
    """
    _check_profile_save(pack, tier_settings(values), context.output)
    load_native()  # before anything imports it for its own use
    cache_dir = _compile_cache(values.compile_cache, context.output)
    options = dataclasses.replace(
        engine_options(values, platform), all_logits=all_logits, cache_dir=cache_dir
    )
    with context.output.progress() as report:
        engine = context.open_engine(pack, options, report)
    try:
        for line in engine.notes:
            context.output.note(line)
        yield engine
    except BaseException:
        try:
            engine.close()
        except StrataError as error:  # the command ends for the first reason, but this is one, too
            context.output.error(str(error))
        raise
    engine.close()


def _check_profile_save(pack: Pack, tiers: TierSettings, output: Output) -> None:
    save = tiers.expert_profile_save
    if save is None:
        return
    check_replaceable(pack, save)
    if tiers.expert_profile is None and save.is_file():
        output.note(
            f"--expert_profile_save={save}: what this run learns takes the place of what is there; "
            f"--expert_profile={save} begins with it"
        )


def versions() -> dict[str, str]:
    """What decides the bits of an answer beside the model file."""
    packages = ("jax", "jaxlib", "numpy")
    found = {package: importlib.metadata.version(package) for package in packages}
    return {"strata_jax": __version__, **found, "python": machine_facts.python_version()}


def _compile_cache(asked: str | None, output: Output) -> Path | None:
    """The folder for compiled programs, made.

    Raises:
        UsageError: if the folder asked for cannot be used; the default one is done without.
    """
    if asked == "off":
        return None
    folder = user_cache_dir() if asked is None else user_path("compile_cache", asked)
    if folder is None:
        output.note("compiled programs are not kept: no home folder; --compile_cache names one")
        return None
    problem = _why_no_cache(folder)
    if problem is None:
        return folder
    if asked is not None:
        raise UsageError(
            f"--compile_cache={asked}: {problem}, a folder to write to expected, or off"
        )
    output.note(
        f"compiled programs are not kept: {folder}: {problem}; --compile_cache names another folder"
    )
    return None


def _why_no_cache(folder: Path) -> str | None:
    """Why programs cannot be kept in a folder, which is made; None if they can."""
    try:
        str(folder).encode()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except UnicodeEncodeError:
        return "its name is not UTF-8, which JAX expects"
    except OSError as error:
        return error.strerror
    return None
