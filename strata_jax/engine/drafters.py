"""Which drafters an engine has: planned before the model is loaded, opened after it, closed before it."""

import dataclasses
import functools
import time
from collections.abc import Callable

from strata_jax.config import MOST_DRAFTS, DraftSettings
from strata_jax.engine.draft_flow import DraftFlow
from strata_jax.engine.draft_length import DraftLength
from strata_jax.engine.drafting import Drafting, Source
from strata_jax.engine.lookup_drafter import LookupDrafter
from strata_jax.engine.mtp_drafter import MtpDrafter
from strata_jax.engine.options import EngineOptions
from strata_jax.engine.runner import Runner
from strata_jax.engine.scripted_drafter import ScriptedDrafter
from strata_jax.engine.scripted_follower import ScriptedFollower
from strata_jax.weights.draft_layer import find_draft_layer
from strata_jax.weights.draft_needs import DraftNeeds, draft_needs, draft_sizes
from strata_jax.weights.pack import Pack


class Drafters:
    """Those of one engine."""

    def __init__(
        self, options: EngineOptions, settings: DraftSettings | None, needs: DraftNeeds | None
    ):
        self.needs = needs
        """What the draft layer takes of the memory; None if there is none."""
        self.drafting: Drafting | None = None
        """Asks them; None if there are none, or no room for drafts."""
        self.notes: tuple[str, ...] = ()
        """What a user should know, one line each; after `open`."""
        self._options = options
        self._scripted = None if options.draft_script is None else options.draft_script.load()
        self._settings = settings
        self._mtp: MtpDrafter | None = None

    @classmethod
    def plan(cls, pack: Pack, options: EngineOptions, context: int) -> "Drafters":
        """Finds out what there is, from headers alone.

        Raises:
            UsageError, BadFileError: for settings, a script or a file of the draft layer that cannot be used.
        """
        settings = options.draft_settings()
        needs = draft_needs(
            pack, settings, context, options.kv, options.step_sizes(), options.platform
        )
        return cls(options, settings, needs)

    @property
    def any(self) -> bool:
        """Whether windows may hold drafts."""
        options = self._options
        others = options.draft_script is not None or options.suffix_draft > 0
        return options.most_drafts() > 0 and (others or self.needs is not None)

    @property
    def follow(self) -> bool:
        """Whether the draft layer works on a device by itself, and is never asked by the host.

        The host asks where it waits for every window: for logits, or to look things up in the text.
        """
        options = self._options
        host_asks = options.platform == "cpu" or options.all_logits or options.suffix_draft > 0
        return self.needs is not None and not host_asks

    def open(self, pack: Pack, runner: Runner, report: Callable[[str], None]) -> None:
        """Loads and compiles.

        Raises:
            StrataError: if one of them cannot be had.
        """
        options, most = self._options, self._options.most_drafts()
        length = functools.partial(DraftLength, most, ahead=runner.options.backend.is_device)
        sources = []
        if self._scripted is not None:
            sources.append(self._script(self._scripted, runner))
        elif options.suffix_draft:
            drafter = LookupDrafter(options.suffix_draft)
            sources.append(Source(name="lookup", drafter=drafter, length=length()))
        if self.needs is not None:
            self._mtp = self._open_mtp(pack, runner, report)
            flow = DraftFlow(runner, self._mtp) if runner.options.ring else None
            sources.append(Source(name="mtp", drafter=self._mtp, length=length(), flow=flow))
        if sources and most > 0:
            self.drafting = Drafting(sources, most, options.min_probability)
        self.notes += (
            _idle_notes(options) if most == 0 else _missing_notes(self._settings, self.needs)
        )
        self.notes += _width_notes(options) if sources else ()

    def close(self) -> None:
        """Lets go of the draft layer, before the model."""
        if self._mtp is not None:
            self._mtp.close()
            self._mtp = None

    def _script(self, drafter: ScriptedDrafter, runner: Runner) -> Source:
        flow = None
        if runner.options.backend.is_device and self._options.most_drafts() > 0:
            flow = DraftFlow(runner, ScriptedFollower(drafter, runner))
        return Source(name="script", drafter=drafter, length=None, flow=flow)

    def _open_mtp(self, pack: Pack, runner: Runner, report: Callable[[str], None]) -> MtpDrafter:
        settings, options = self._settings, runner.options
        assert settings is not None, "there are needs"
        draft = find_draft_layer(pack, settings.mtp)
        assert draft is not None, "there are needs"
        self.notes = (
            *draft.notes,
            f"drafts: the draft layer guesses up to {settings.most} ids for a window, as long as that pays; "
            "--mtp=off leaves it out",
        )
        began = time.perf_counter()
        steps = runner.tiers.plan.steps
        sizes = draft_sizes(runner.config, settings, options.max_context, options.kv, steps)
        try:
            drafter = MtpDrafter.open(
                draft,
                runner.ops,
                runner.config,
                settings,
                sizes,
                runner.placing,
                report,
                drawable=runner.drawable if options.ring else None,
            )
        except BaseException:
            draft.close()
            raise
        runner.compile_s += time.perf_counter() - began
        return drafter


def _idle_notes(options: EngineOptions) -> tuple[str, ...]:
    """Which settings of drafts have no effect, because a window has one live row."""
    idle = ["--suffix_draft"] if options.suffix_draft else []
    idle += [] if options.mtp is None else _changed(options.mtp)
    if not idle:
        return ()
    return (f"{', '.join(idle)}: no effect, a window of one live row has no room for drafts",)


def _width_notes(options: EngineOptions) -> tuple[str, ...]:
    """That drafts end before --spec does, where they do."""
    if options.spec is None or options.spec <= MOST_DRAFTS + 1:
        return ()
    return (
        f"--spec={options.spec}: so many rows of known text; a window holds {MOST_DRAFTS} drafts behind "
        "its certain id at most",
    )


def _missing_notes(settings: DraftSettings | None, needs: DraftNeeds | None) -> tuple[str, ...]:
    """Which settings of a draft layer have no effect, because there is none."""
    if settings is None or needs is not None:
        return ()
    idle = _changed(settings)
    if not idle:
        return ()
    return (f"{', '.join(idle)}: no effect, the model has no draft layer; --mtp=FILE names one",)


def _changed(settings: DraftSettings) -> list[str]:
    """Flags of a draft layer that are not as usual."""
    return [
        f"--{field.name}"
        for field in dataclasses.fields(DraftSettings)
        if field.name not in ("most", "min_probability")
        and getattr(settings, field.name) != field.default
    ]
