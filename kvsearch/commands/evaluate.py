"""Methods and policy files on workloads, paired with the full cache: `kvsearch eval`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.commands.evaluated import Evaluated, EvaluateResult, NotWritten, Workload, write_nll
from kvsearch.commands.kvpress_results import Predicted, predicted, require_prompts, write
from kvsearch.errors import KvsearchError, RunError
from kvsearch.evaluation.answers import answered, answers, fits, greedy_of
from kvsearch.files import require_writable
from kvsearch.options.function import takes
from kvsearch.options.other_commands import EvaluateConfig
from kvsearch.policy import Policy, layout
from kvsearch.policy_space import Setting
from kvsearch.results.intervals import clustered, paired, standard_error
from kvsearch.results.measurement import Anchored, Measurement, kept
from kvsearch.results.records import Interval
from kvsearch.session import load
from kvsearch.session.context_worth import Worth, bare, groups
from kvsearch.session.make_workloads import from_tasks, own_answers, say_own
from kvsearch.session.self_check import self_check
from kvsearch.session.session import Session
from kvsearch.workloads import Prompts
from kvsearch.workloads.items import Ids
from kvsearch.workloads.measured_parts import TEXT, Part, require_names
from kvsearch.workloads.prompts.encode import items_of
from kvsearch.workloads.prompts.files import Record, read_all
from kvsearch.workloads.text import split
from kvsearch.workloads.text import windows as cut_windows


@takes(EvaluateConfig)
def evaluate(config: EvaluateConfig) -> EvaluateResult:
    """Measure policies against the full cache, paired: on a text, on prompts, or on both.

    The options are those of `kvsearch eval`. Of several policies, methods that model or budget
    refuse are left out.

    Returns:
        A row per workload and policy, with paired differences to the full cache, what each
        workload is for this model, and what was left out.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence.
        NotWritten: such an error after all was measured; it has the result.
    """
    session = Session(config, config.policies)
    specs, records = config.specs(), read_all(config.prompts)
    require_names([*[TEXT] * config.windowed, *(spec.label for spec in specs), *records])
    length = config.extent[1] if config.windowed else 1
    config.check_prompt(length)
    if config.nll_out is not None:
        require_writable(config.nll_out)
    session.load(context=max([length, *(spec.tokens for spec in specs)]))
    return _Evaluation(session, records).result()


class _Evaluation:
    """The rows of an evaluation, workload by workload."""

    def __init__(
        self, session: Session[EvaluateConfig], records: Mapping[str, Sequence[Record]]
    ) -> None:
        self.session, self.config, self.loaded = session, session.config, session.loaded
        self.shown, self.records = session.shown, records
        self.rows, self.workloads = list[Evaluated](), list[Workload]()
        self.left_out, self.generated = dict[str, str](), list[Predicted]()

    def result(self) -> EvaluateResult:
        """Everything, measured."""
        config, fault = self.config, ""
        prompts = self._prompts()
        if config.kvpress_out is not None:
            require_prompts(prompts)
            require_writable(config.kvpress_out / "config.yaml")
        losses = self._on_text() if config.windowed else None
        if prompts:
            fault = self_check(self.loaded, prompts, self.records, self.shown)
        for workload in prompts:
            self._on_prompts(workload)
        folders = []
        if config.kvpress_out is not None:
            where = self.loaded.name, self.loaded.device, config.see
            folders = write(config.kvpress_out, *where, self.generated)
        about = load.about(self.loaded)
        result = EvaluateResult(self.rows, self.workloads, about, self.left_out, folders, fault)
        if config.nll_out is not None and losses is not None:
            try:
                write_nll(config.nll_out, *losses)
            except RunError as e:
                raise NotWritten(str(e), result) from e
        return result

    def _prompts(self) -> list[Prompts]:
        """Those of tasks, of the part that no search sees, and of files."""
        config, found = self.config, list[Prompts]()
        if specs := config.specs():
            prose = split(self.session.text).report
            found += from_tasks(self.loaded, specs, prose, config.see, config.items, config.seed)
        for name, some in self.records.items():
            say_own(self.shown, name, some)
            found.append(items_of(self.loaded, name, some, config.see, greedy_of(self.loaded)))
        return found

    def _policies(self, workload: str, setting: Setting) -> list[Policy]:
        """The policies at this size; what cannot be is left out there."""
        chosen, refused = self.session.some_policies(setting)
        several = self.config.windowed + len(self.config.specs()) + len(self.records) > 1
        for name, why in refused.items():
            why = f"{workload}: {why}" if several else why
            self.left_out[name] = "; ".join(filter(None, (self.left_out.get(name), why)))
        return chosen

    def _on_text(self) -> tuple[list[tuple[str, NDArray[np.float32]]], Ids]:
        """Measure the windows of a text, whose losses `write_nll` takes."""
        config, session = self.config, self.session
        W, T = config.extent
        setting, budget = session.setting(T, config.prompt), config.budget(self.loaded.shape)
        start = config.score_from or max(1, int(budget.slots if budget else 1))
        if start >= T:
            raise KvsearchError(f"--score-from {start} lies outside a window of {T}")
        start = max(start, config.prompt)
        source, evaluator = session.text, session.evaluator
        ids = cut_windows(source, count=W, length=T)
        setting = session.measured(setting, source, count=W, length=T)
        chosen = self._policies(TEXT, setting)
        measured: list[tuple[Policy, Measurement]] = []
        with self.shown.step("evaluate", len(chosen) + 1) as step:
            full = evaluator.quality(Policy(name="full"), ids)
            step.advance()
            for policy in chosen:
                quality = evaluator.quality(policy, ids, prompt=config.prompt)
                measured.append((policy, quality))
                if (found := quality.anchored) is not None:
                    self.shown.say(
                        f"{policy.name}: {found.count} anchors in {W} windows of {T} tokens"
                        + ("; warning: without any, no sequence closes" * (not found.count))
                    )
                step.advance(note=policy.name or "")
        whole = full.nll[:, start - 1 :]
        hashes = {"text_sha256": source.text_sha256, "token_sha256": source.token_sha256}
        self.workloads.append(
            Workload(
                name=TEXT, items=W, tokens=T, scored=int(whole.size),
                digest=Part.text(TEXT, ids).digest, full=float(whole.mean()),
                text={"name": source.name, **hashes}, score_from=start,
            )
        )  # fmt: skip
        for policy, quality in measured:
            nll = quality.nll[:, start - 1 :]
            mean = float(nll.mean())
            row = self._row(
                policy, setting, quality.anchored, workload=TEXT, nll=mean,
                dnll_full=paired(nll, whole), bytes_resident=quality.bytes_resident,
                seconds=quality.seconds, impls=quality.impls,
            )  # fmt: skip
            self.rows.append(replace(row, nll_se=standard_error(nll), ppl=math.exp(mean)))
        return [(p.name or "", q.nll) for p, q in measured], ids

    def _on_prompts(self, workload: Prompts) -> None:
        """Measure the answers of a workload, and generate them where a folder is asked for."""
        session, evaluator, name = self.session, self.session.evaluator, workload.name
        setting = session.setting(workload.longest, workload.prompt, prompts=True)
        setting = session.measured(setting)
        chosen = self._policies(name, setting)
        generates = self.config.kvpress_out is not None
        with self.shown.step(name, (len(chosen) + 2) * (1 + generates) * len(workload.items)) as s:
            few = fits(evaluator, workload)
            full = answers(evaluator, Policy(name="full"), workload, keep=few, progress=s.advance)
            without = bare(workload, self.loaded)
            empty = answers(evaluator, Policy(), without, resident=False, progress=s.advance)
            worth = Worth.of(workload, full, empty)
            self.workloads.append(
                Workload(
                    name=name, items=len(workload.items), tokens=workload.longest,
                    scored=workload.asks, digest=workload.digest, full=worth.full,
                    see=workload.see, own=own_answers(self.records.get(name, ())),
                    empty=worth.empty, passes=worth.passes, full_exact=float(full.exact.mean()),
                )
            )  # fmt: skip
            if not worth.passes:
                self.shown.say(
                    f"{name}: {self.loaded.name} does not need the context for these answers "
                    f"(NLL {worth.full:.2f} with it, {worth.empty:.2f} without): shares lost say "
                    "nothing here"
                )
            whole, scale = answered(workload, full), worth.nats if worth.nats > 0 else math.nan
            for policy in chosen:
                found = answers(
                    evaluator, policy, workload, full=full.log if few else None,
                    progress=s.advance,
                )  # fmt: skip
                gap = clustered(found.nll - full.nll, groups(workload))
                lost = Interval(gap.mean / scale, gap.lo / scale, gap.hi / scale)
                keeps = kept(name, lost, answered(workload, found), whole)
                row = self._row(
                    policy, setting, workload=name, nll=float(found.nll.mean()), dnll_full=gap,
                    bytes_resident=found.bytes_end, seconds=found.seconds, impls=found.impls,
                )  # fmt: skip
                row = replace(row, bytes_prompt=found.bytes_prompt, lost=lost, exact=keeps.exact,
                              flips=keeps.flips, asks=keeps.asks, kl=keeps.kl)  # fmt: skip
                self.rows.append(row)
            if generates:
                for policy in [Policy(name="full"), *(p for p in chosen if p.name != "full")]:
                    ratio = _saved(policy, setting)
                    self.generated.append(
                        predicted(evaluator, policy, workload, ratio, progress=s.advance)
                    )

    def _row(
        self, policy: Policy, setting: Setting, found: Anchored | None = None, **measured: Any
    ) -> Evaluated:
        """A row with the bytes of the policy, which anchors in a text decide with it."""
        shape, limit, prompt = setting.shape, setting.budget_bytes, setting.prompt
        sizes, tokens = layout(policy, shape), setting.tokens if found is None else found.tokens
        peak = sizes.bytes_peak(tokens, prompt)
        return Evaluated(
            policy=policy.name or "",
            fingerprint=policy.fingerprint(shape.layers),
            bytes_peak=peak,
            bytes_peak_text=peak if found is None else found.bytes.peak,
            bytes_mean=sizes.bytes_mean(tokens, prompt) if found is None else found.bytes.mean,
            bytes_asked=sizes.bytes_at(tokens, prompt),
            slots16=peak / shape.budget_bytes(1),
            within_budget=None if limit is None else peak <= limit,
            **measured,
        )


def _saved(policy: Policy, setting: Setting) -> float:
    """Share of the full cache's bytes that a policy saves at its peak."""
    mine, full = (
        layout(p, setting.shape).bytes_peak(setting.tokens, setting.prompt)
        for p in (policy, Policy())
    )
    return 1 - mine / full
