"""`strata-jax doctor`: what this machine offers, what would be used, and why not the rest."""

from typing import Any

from absl import flags

from strata_jax.cli import flags as cli_flags
from strata_jax.cli.context import Context
from strata_jax.errors import StrataError

SUMMARY = "says which devices, kernels and libraries would be used, and why not others"


def define(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    cli_flags.define_model(values)
    flags.DEFINE_boolean("json", False, "prints one JSON object", flag_values=values)


def run(values: flags.FlagValues, context: Context) -> int:
    """Prints the report; 0 if the CPU path works, whatever else does not."""
    from strata_jax.cli import checks
    from strata_jax.cli.files import model_path

    with context.output.progress() as tell:
        tell("looking at the machine, JAX and the native library")
        report = checks.examine(model_path(values))
    if values.json:
        context.output.json(report)
    else:
        context.output.text("\n".join(_lines(report)) + "\n")
    return 0 if report["works"] else StrataError.exit_code


def _lines(report: dict[str, Any]) -> list[str]:
    """The report for people, the answer first."""
    if report["works"]:
        lines = [_answer(report)]
    else:
        lines = ["does not work:", *(f"  {problem}" for problem in report["problems"])]
    lines += ["", "devices"]
    for device in report["devices"]:
        verdict = "usable" if device["usable"] else "not usable"
        lines.append(f"  {device['name']}: {verdict}, {device['why']}")
    lines += ["", "expert tiers"]
    for name, tier in report["tiers"].items():
        lines.append(f"  {name:<8} {'on' if tier['on'] else 'off'}: {tier['why']}")
    lines += ["", "kernels"]
    for name, why in report["kernels"]["sets"].items():
        lines.append(f"  {name:<8} {why}")
    lines += ["", f"speed    {report['speed']['summary']}"]
    for title in ("cpu", "memory", "versions", "ffi_api", "libraries", "environment"):
        lines += ["", title.replace("_", " ")]
        lines += [f"  {key}: {_shown(value)}" for key, value in report[title].items()]
    return lines


def _answer(report: dict[str, Any]) -> str:
    """On what a model runs: on the first GPU, and on the CPU if there is none."""
    cpu = f"on the CPU, {report['kernels']['used']} kernels"
    gpus = [device for device in report["devices"][1:] if device["is_there"]]
    if not gpus:
        return f"works: {cpu}"
    first, usable = gpus[0]["name"], [device["name"] for device in gpus if device["usable"]]
    if gpus[0]["usable"]:
        return f"works: on {first}; {cpu}, with --platform=cpu"
    other = f"; CUDA_VISIBLE_DEVICES can put {usable[0]} first" if usable else ""
    return f"works: {cpu}, with --platform=cpu; {first}, which is taken without it, cannot be used{other}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return "unknown" if value is None else str(value)
