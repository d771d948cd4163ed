"""Everything about channels: their classes at each check, certificates, repairs, and the events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from cirron_otel.monitor import certificate, manifest
from cirron_otel.monitor.certificate import Certificates, Evidence, Verdict, Window
from cirron_otel.monitor.checks.channels import (
    Channels,
    Classes,
    channels_of,
    classify,
    indices,
    nothing_stuck,
)
from cirron_otel.monitor.fading import Fading
from cirron_otel.monitor.from_start import FromStart
from cirron_otel.monitor.guardian import WRITTEN, Guardian
from cirron_otel.monitor.levels import Levels
from cirron_otel.monitor.owners import Owners
from cirron_otel.monitor.producers import (
    Producer,
    activity_of,
    find_producers,
    shared_parameters,
)
from cirron_otel.monitor.quiet import Quiet
from cirron_otel.monitor.repairs import Repairs
from cirron_otel.monitor.structure import Consumers, Discovery, Structure

if TYPE_CHECKING:
    from cirron_otel._guard import Guard
    from cirron_otel.findings import Finding
    from cirron_otel.monitor.activity import Activity
    from cirron_otel.monitor.filters import Wanted
    from cirron_otel.monitor.manifest import Facts
    from cirron_otel.monitor.observing import Observation

Event = tuple[str, dict[str, Any]]
#: The rule of an event that ends a certificate.
VIOLATED = "certificate_violated"


class ChannelWatch:
    """What is remembered of the channels of all layers. The training thread.

    ``tell`` writes an event between two checks, ``now`` gives the step under way.
    """

    def __init__(
        self, facts: Facts, guard: Guard, tell: Callable[..., object], now: Callable[[], int]
    ) -> None:
        self._facts = facts
        self._guard = guard
        self._tell, self._now = tell, now
        #: The optimizers that are known.
        self.owners = Owners(facts.optimizer, facts.config.certify_optimizers, guard)
        self._certificates = Certificates(self.owners)
        self._repair = Repairs(facts, self.owners)
        self._guardian = Guardian(facts.model, self.owners, guard, self._violated_between)
        self._structure: Structure | None = None
        self._activity: Activity | None = None
        #: Looks again at what follows certified layers.
        self._retest: Discovery | None = None
        self.producers: list[Producer] = []
        self._quiet = Quiet(facts.config)
        self._fading = Fading(facts.config)
        self._levels = Levels(facts.config)
        self._from_start = FromStart()
        self._certified_once: set[str] = set()
        self._refused: set[tuple[str, str]] = set()
        self._step: int | None = None
        #: Certificates that were ended by a broken premise.
        self.violated = 0

    @property
    def findings(self) -> list[Finding]:
        """Of the last check, what is no event."""
        return [*self._quiet.findings, *self._fading.findings]

    @property
    def stuck(self) -> dict[str, list[int]]:
        """Counts by class of each producer at the last check."""
        return self._levels.stuck

    @property
    def never(self) -> Mapping[str, str]:
        """By producer, why nothing of it can ever be proven."""
        return self._certificates.never

    @property
    def wants_graph(self) -> bool:
        """Whether the graph of the next checked loss will be looked at."""
        return self._structure is None or bool(self._guardian.layers)

    # --- windows ----------------------------------------------------------------------------------

    def begin(self, structure: Structure, discovery: Discovery | None) -> None:
        """The structure is known: say whose channels are looked at."""
        self._structure = structure
        self.find_producers()
        for one in self.producers if discovery is not None and self._activity is not None else ():
            peak = discovery.peaks.get(one.batchnorm_name or one.name)  # type: ignore[union-attr]
            if one.quiet_below is not None and peak is not None:
                self._activity.add(one.name, peak)  # type: ignore[union-attr]

    def find_producers(self) -> None:
        """Look at the producers there are now: at first, and when layers begin to learn."""
        structure, facts = self._structure, self._facts
        if structure is None:
            return
        if self._activity is not None:
            self._activity.stop()
        before = {one.name: one for one in self.producers}
        self.producers = find_producers(facts, structure)
        for one in self.producers:
            was = before.get(one.name)
            if was and (was.module is not one.module or was.batchnorm is not one.batchnorm):
                self._certificates.forbid(one.name, "another module stands in its place now")
        self._activity = activity_of(facts, self.producers, self._guard)
        family = self.owners.family(facts.optimizer)
        shared = shared_parameters(facts.model)
        for one in self.producers:
            why = manifest.why_no_relu(facts, structure, one.name) or certificate.why_never(
                one, facts.optimizer, family, structure.blocked, shared
            )
            if why is not None:
                self._certificates.forbid(one.name, why)

    def begin_window(self) -> None:
        """The next step is checked."""
        if self._activity is not None:
            self._activity.begin()
        layers = self._guardian.layers
        if layers and self._retest is None:
            modules = {one.name: one.module for one in layers}
            modules |= {
                one.batchnorm_name: one.batchnorm for one in layers
                if one.batchnorm is not None and one.batchnorm_name is not None
            }  # fmt: skip
            self._retest = Discovery(self._facts.model, modules, self._guard)

    def end_window(self) -> None:
        """Look at forward passes no more."""
        if self._activity is not None:
            self._activity.stop()

    def stop(self) -> None:
        """Take every hook away."""
        self.end_window()
        if self._retest is not None:
            self._retest.forget()
        self._guardian.stop()
        self.owners.stop()

    # --- a check ----------------------------------------------------------------------------------

    def wanted(self) -> list[Wanted]:
        """What the check has to look at."""
        peaks = {} if self._activity is None else self._activity.end()
        tolerance = self._facts.config.decayed_rel_tol
        largest = self._fading.largest
        return [one.wanted(peaks, tolerance, largest(one.name)) for one in self.producers]

    def look(self, seen: Observation, root: object, *, skips: bool) -> Iterator[Event]:
        """The events of one check, in the order in which they are written.

        ``root`` is the loss, or the node that made it; ``skips`` says that a gradient scaler will
        skip this step.
        """
        step, first = seen.step, self._step is None
        activity = None if first else self._activity
        window = Window(activity, step - (self._step or 0), skips, Consumers(root))
        self._step = step
        self._levels.begin()
        self._quiet.begin()
        self._fading.begin()
        self._certificates.begin(self.producers)
        classes = {one.name: self._classes_of(one, seen) for one in self.producers}
        if first:
            self._from_start.begin(classes)
        evidence = self._certificates.gather(
            one for one in self.producers if self._is_suspect(one, classes[one.name])
        )
        self._look_at_structure_again(root)
        for producer in self.producers:
            name = producer.name
            found = self._from_start.without_learning(name, classes[name], evidence)
            yield from self._look_at(producer, seen, window, found, evidence)

    def _classes_of(self, producer: Producer, seen: Observation) -> Classes | None:
        rows, tolerance = seen.rows.get(producer.name), self._facts.config.decayed_rel_tol
        has_relu = producer.has_relu
        if rows is None or nothing_stuck(rows, has_relu=has_relu, tolerance=tolerance):
            return None
        return classify(rows, has_relu=has_relu, tolerance=tolerance)

    def _is_suspect(self, producer: Producer, classes: Classes | None) -> bool:
        if self._guardian.channels(producer.name) is not None:
            return True
        if classes is None:
            return False
        began_as_zero = self._from_start.channels(producer.name) is not None
        return began_as_zero or bool(classes.candidate.any())

    def _look_at_structure_again(self, root: object) -> None:
        """Whether what follows a certified layer is still what it was."""
        retest, self._retest = self._retest, None
        if retest is None:
            return
        again = retest.finish(root)
        if not again.seen or again.graph is None:
            return
        for one in self._guardian.layers:
            if not again.has_relu(one.name) or again.pairs.get(one.name) != one.batchnorm_name:
                self._certificates.forbid(one.name, "something else follows it now than at first")
            elif (why := again.blocked.get(one.name)) is not None:
                self._certificates.forbid(one.name, why)

    def _look_at(
        self, producer: Producer, seen: Observation, window: Window, classes: Classes | None,
        evidence: Mapping[str, Evidence],
    ) -> Iterator[Event]:  # fmt: skip
        name = producer.name
        quiet = self._quiet.look(seen, producer)
        self._fading.look(seen, producer, classes)
        standing = self._guardian.channels(name)
        if classes is None and standing is None:
            is_calm = quiet is None and not self._repair.follows(name)
            if is_calm and self._levels.stays_calm(producer):
                return  # the usual case
            channels = channels_of(producer.channels, None, None, quiet)
            yield from self._levels.look(seen.step, producer, channels)
            yield from self._repairs(seen.step, producer, None, None, quiet)
            return
        verdict, again = self._verdict(producer, window, classes, evidence)
        certified = verdict.certified
        channels = channels_of(producer.channels, classes, certified, quiet)
        if standing is not None:
            for why, mask in self._broken(producer, standing, window, classes, again):
                standing = standing & ~mask
                yield self._violation(seen.step, producer, channels, mask, why)
        yield from self._levels.look(seen.step, producer, channels)
        if bool(certified.any()):
            yield from self._certify(seen.step, producer, certified, standing)
        for why, count in verdict.refused:
            if (name, why) not in self._refused:
                self._refused.add((name, why))
                yield (
                    "certificate_refused",
                    {
                        "step": seen.step, "severity": "info", "layer": name,
                        "batchnorm": producer.batchnorm_name, "count": count, "reason": why,
                    },
                )  # fmt: skip
        standing = certified if standing is None else standing | certified
        self._guardian.watch(producer, standing)
        yield from self._repairs(seen.step, producer, classes, certified, quiet)

    def _verdict(
        self, producer: Producer, window: Window, classes: Classes | None,
        evidence: Mapping[str, Evidence],
    ) -> tuple[Verdict, Evidence | None]:  # fmt: skip
        nowhere = torch.zeros(producer.channels, dtype=torch.bool)
        known = evidence.get(producer.name)
        if classes is None or known is None or not bool(classes.candidate.any()):
            return Verdict(nowhere, []), known
        judge, why_not = self._certificates.judge, self._certificates.why_not
        verdict = judge(classes, why_not(producer, window), known)
        standing = self._guardian.channels(producer.name)
        new = verdict.certified if standing is None else verdict.certified & ~standing
        if bool(new.any()) and self._certificates.look_for_others(producer):
            known = self._certificates.gather([producer])[producer.name]
            verdict = judge(classes, why_not(producer, window), known)
        if bool(new.any()) and (why := window.why_no_relu(producer.name)) is not None:
            verdict = judge(classes, why, known)
        return verdict, known

    # --- certificates -----------------------------------------------------------------------------

    def _certify(
        self, step: int, producer: Producer, certified: torch.Tensor, standing: torch.Tensor | None
    ) -> Iterator[Event]:
        name, rule = producer.name, None
        found = indices(certified if standing is None else certified & ~standing)
        if not found:
            return
        if name in self._certified_once:
            rule = "more_channels" if standing is not None and bool(standing.any()) else "again"
        self._certified_once.add(name)
        yield (
            "certificate",
            {
                "step": step, "severity": "proof", "layer": name,
                "batchnorm": producer.batchnorm_name,
                "channels": found[: self._facts.config.channel_list_limit], "count": len(found),
                "statement": certificate.STATEMENT, "assumes": certificate.ASSUMES,
                **({} if rule is None else {"rule": rule}),
            },
        )  # fmt: skip

    def _broken(
        self, producer: Producer, standing: torch.Tensor, window: Window, classes: Classes | None,
        evidence: Evidence | None,
    ) -> list[tuple[str, torch.Tensor]]:  # fmt: skip
        """Which standing certificates no longer hold, and why."""
        why = self._certificates.why_broken(producer, window)
        if why is not None:
            return [(why, standing)]
        if evidence is None:
            return []
        if window.skips:  # gradients that are no numbers are thrown away with the step
            evidence = evidence._replace(gradient=torch.zeros_like(standing))
        broken = self._certificates.violations(producer, standing, classes, evidence)
        if self._guardian.was_written(producer.name):
            return [(WRITTEN if why == certificate.MOVED else why, m) for why, m in broken]
        return broken

    def _violation(
        self, step: int, producer: Producer, channels: Channels, mask: torch.Tensor, why: str,
        **more: object,
    ) -> Event:  # fmt: skip
        self.violated += 1
        lost = indices(mask)
        return "channels", {
            **self._levels.fields(step, producer, channels),
            "severity": "warning",
            "rule": VIOLATED,
            "n_violated": len(lost),
            "violated": lost[: self._facts.config.channel_list_limit],
            "reason": why,
            **more,
        }

    def _violated_between(self, layer: str, mask: torch.Tensor | None, why: str) -> None:
        """A premise was broken between two checks: told at once."""
        standing = self._guardian.channels(layer)
        producer = next((one for one in self.producers if one.name == layer), None)
        if standing is None or producer is None:
            return
        lost = standing if mask is None else standing & mask
        self._guardian.watch(producer, standing & ~lost)
        before, gone = self._levels.last(producer), set(indices(lost))
        certified = [one for one in before.certified if one not in gone]
        flat = before.flat
        if mask is None:  # they are as they were, and only the proof is gone
            flat = sorted({*flat, *(gone & {*before.certified})})
        channels = Channels(producer.channels, certified, flat, before.silent, before.decayed)
        # An event's step is that of the last check; when it was seen stands beside it.
        kind, fields = self._violation(
            self._step or 0, producer, channels, lost, why, seen_at=self._now()
        )
        self._tell(kind, **fields)

    # --- repair -----------------------------------------------------------------------------------

    def _repairs(
        self, step: int, producer: Producer, classes: Classes | None,
        certified: torch.Tensor | None, quiet: torch.Tensor | None,
    ) -> Iterator[Event]:  # fmt: skip
        from_start = self._from_start.channels(producer.name)
        targets = self._repair.targets(producer, classes, from_start, quiet)
        found = self._repair.look(step, producer, targets, certified)
        if found is not None:
            done, fields = found
            self._end_certificates(producer, done.channels)
            yield "repair", fields

    def _end_certificates(self, producer: Producer, channels: list[int]) -> None:
        """Channels were changed by us: what was certified of them is over."""
        standing = self._guardian.channels(producer.name)
        if standing is not None:
            standing = standing.clone()
            standing[channels] = False
            self._guardian.watch(producer, standing)
        self._from_start.changed(producer.name, channels)

    def undo(self, layer: str | None) -> Iterator[Event]:
        """Take back the last repair of a layer, or of every layer that had one."""
        for done, fields in self._repair.undo(self._step or 0, layer):
            self._end_certificates(done.producer, done.channels)
            yield "repair", fields
