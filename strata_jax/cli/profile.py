"""`strata-jax profile`: routing records to a ranking of experts, and work on rankings."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from absl import flags

from strata_jax.cli import flags as cli_flags
from strata_jax.cli.context import Context
from strata_jax.cli.files import output_path, user_path
from strata_jax.errors import BadFileError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from strata_jax.weights.profile import Profile
    from strata_jax.weights.routing import RoutingReader

SUMMARY = "makes, merges, reorders and shows rankings of experts for --expert_profile"
_ACTIONS = ("show", "make", "merge", "reorder")
_SHOWN_PAIRS = 10


def define(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    cli_flags.define_choice(
        values,
        "action",
        list(_ACTIONS),
        "show prints one --profile; make ranks by how often the --routing records used an expert; "
        "merge makes one ranking of several --profile; reorder moves the experts that the --routing "
        "records used to the front of one --profile",
    )
    flags.DEFINE_multi_string("profile", [], "a ranking; may be given again", flag_values=values)
    flags.DEFINE_multi_string(
        "routing", [], "routing records of a run; may be given again", flag_values=values
    )
    flags.DEFINE_string("out", None, "the ranking to write", flag_values=values)
    flags.DEFINE_list(
        "weights",
        None,
        "merge: what each --profile counts, in their order: 2,1; 1 each if not given",
        flag_values=values,
    )
    flags.DEFINE_string(
        "model", None, "GGUF file: refuses what is another model's", flag_values=values
    )
    flags.DEFINE_boolean("json", False, "prints one JSON object", flag_values=values)


def run(values: flags.FlagValues, context: Context) -> int:
    """Does what --action says; prints what the ranking is like.

    Raises:
        UsageError: for flags that do not go together.
        BadFileError: for files that are broken or of another model.
    """
    from strata_jax.weights.profile import Profile
    from strata_jax.weights.routing import RoutingReader

    _check(values)
    profiles = [Profile.load(path) for path in _paths("profile", values.profile)]
    readers = [RoutingReader(path) for path in _paths("routing", values.routing)]
    _check_models(values, profiles, readers)
    result = _act(values, profiles, readers, context)
    path = output_path("out", values.out)
    try:
        if path is not None:
            result.save(path)
            context.output.note(f"wrote {path}: {len(result.ranked)} experts ranked")
    finally:  # the ranking comes out, whatever else can be written
        if values.json:
            context.output.json(_summary(result))
        else:
            context.output.text("\n".join(_lines(result)) + "\n")
    return 0


def _act(
    values: flags.FlagValues,
    profiles: list["Profile"],
    readers: list["RoutingReader"],
    context: Context,
) -> "Profile":
    from strata_jax.weights import profile as rankings

    if values.action == "show":
        return profiles[0]
    if values.action == "merge":
        result = rankings.merge(profiles, _weights(values))
        if not result.ranked:
            raise UsageError("profile: --weights of 0 only, one above 0 expected")
        return result
    counts = _count(readers, context)
    if values.action == "make":
        return rankings.rank_counts(readers[0].model, counts)
    return rankings.reorder(profiles[0], counts)


def _check(values: flags.FlagValues) -> None:
    """Every action takes some flags and needs some; the others would do nothing."""
    action = values.action
    profiles, records = len(values.profile), len(values.routing)
    if action in ("show", "reorder") and profiles != 1:
        _refuse(values, f"{profiles} --profile", "one expected")
    if action == "merge" and profiles < 2:
        _refuse(values, f"{profiles} --profile", "two or more expected")
    if action == "make" and profiles:
        _refuse(values, "--profile", "--routing only expected; reorder takes both")
    if action in ("make", "reorder") and not records:
        _refuse(values, "no --routing", "routing records of a run expected")
    if action in ("show", "merge") and records:
        _refuse(values, "--routing", "--profile only expected")
    if action != "merge" and values.weights is not None:
        _refuse(values, "--weights", "none expected: only merge takes them")
    _check_out(values)


def _check_out(values: flags.FlagValues) -> None:
    if values.action == "show":
        if values.out is not None:
            _refuse(values, "--out", "nothing to write expected")
        return
    if values.out is None:
        _refuse(values, "no --out", "a file to write the ranking to expected")
    output_path("out", values.out)


def _refuse(values: flags.FlagValues, received: str, expected: str) -> NoReturn:
    raise UsageError(f"profile: --action={values.action} with {received}, {expected}")


def _weights(values: flags.FlagValues) -> list[float]:
    if values.weights is None:
        return [1.0] * len(values.profile)
    try:
        return [float(weight) for weight in values.weights]
    except ValueError:
        raise UsageError(
            f"profile: --weights={','.join(values.weights)}: numbers with commas expected, as 2,1"
        ) from None


def _count(readers: list["RoutingReader"], context: Context) -> "np.ndarray":
    """How often all records together used each expert, [L, E]."""
    import numpy as np

    from strata_jax.weights.routing import count_routing

    parts = []
    with context.output.progress(at_once=False) as tell:
        for reader in readers:
            tell(f"reading {reader.path}")
            parts.append(count_routing(reader))
    counts = np.sum(parts, axis=0)
    for reader in readers:
        if reader.is_cut:
            context.output.note(f"{reader.path}: the last line is cut off and left out")
    if not counts.any():
        raise BadFileError(f"{readers[0].path}: holds no rows, records of a run expected")
    return counts


def _check_models(
    values: flags.FlagValues, profiles: list["Profile"], readers: list["RoutingReader"]
) -> None:
    """All files are about one model: --model's if it is given."""
    from strata_jax.weights.pack import open_pack
    from strata_jax.weights.profile import routed_model

    paths = [*_paths("profile", values.profile), *_paths("routing", values.routing)]
    files = list(zip(paths, [*profiles, *readers]))
    name, expected = files[0][0], files[0][1].model
    if values.model is not None:
        name = user_path("model", values.model)
        with open_pack(name) as pack:
            expected = routed_model(pack)
    for path, file in files:
        if file.model != expected:
            raise BadFileError(
                f"{path}: is about another model ({file.model}), that of {name} ({expected}) expected"
            )


def _paths(flag: str, names: list[str]) -> list[Path]:
    return [user_path(flag, name) for name in names]


def _summary(profile: "Profile") -> dict[str, Any]:
    """What a ranking is like; `by_layer` counts ranked experts, in all and in its first half."""
    model = profile.model
    by_layer = [0] * model.layers
    first_half = [0] * model.layers
    for rank, (layer, _) in enumerate(profile.ranked):
        by_layer[layer] += 1
        first_half[layer] += rank < math.ceil(len(profile.ranked) / 2)
    return {
        "model": model.hash,
        "layers": model.layers,
        "experts": model.experts,
        "num_ranked": len(profile.ranked),
        "by_layer": by_layer,
        "first_half_by_layer": first_half,
        "ranked": [list(pair) for pair in profile.ranked],
    }


def _lines(profile: "Profile") -> list[str]:
    summary = _summary(profile)
    total = profile.model.layers * profile.model.experts
    first = " ".join(f"{layer}:{expert}" for layer, expert in profile.ranked[:_SHOWN_PAIRS])
    return [
        f"model    {summary['model']}",
        f"ranked   {summary['num_ranked']} of {total} experts "
        f"({summary['layers']} layers, {summary['experts']} experts each)",
        f"hottest  {first} (layer:expert)",
        "",
        "layer    ranked  in the first half",
        *(
            f"{layer:<8} {ranked:<7} {half}"
            for layer, (ranked, half) in enumerate(
                zip(summary["by_layer"], summary["first_half_by_layer"])
            )
        ),
    ]
