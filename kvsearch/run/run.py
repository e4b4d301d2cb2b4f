"""One search from options to a written report. Every stage leaves its results in the folder."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import optuna

from kvsearch.errors import KvsearchError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.exporters.space import searched
from kvsearch.exporters.target_space import aim, starts, stepped
from kvsearch.files import write_atomic
from kvsearch.model_analysis import head_losses
from kvsearch.options.budget import Budget, sized_for
from kvsearch.options.run_config import RunConfig
from kvsearch.policy import Policy
from kvsearch.policy_search.admission import Task, baselines
from kvsearch.policy_search.driver import Search
from kvsearch.policy_search.executors import Executor
from kvsearch.policy_search.samplers import Context, check_name, check_space, make
from kvsearch.policy_search.samplers.kvei import Kvei
from kvsearch.policy_space import SearchSpace, Setting, needs_heads
from kvsearch.policy_space import load as load_space
from kvsearch.policy_space.channels import needs
from kvsearch.policy_space.methods import SELDOM, Method, at, find
from kvsearch.policy_space.portfolio import inside
from kvsearch.policy_space.portfolio import load as load_portfolio
from kvsearch.report.terminal import standing
from kvsearch.report.write import write
from kvsearch.results.folder import RunFolder
from kvsearch.results.records import Trial
from kvsearch.results.run_files import Measured
from kvsearch.results.study import Study
from kvsearch.results.summary import Summary
from kvsearch.run import evaluators, speed, summarise
from kvsearch.run.compile_cpu_loops import compiling
from kvsearch.run.examples import examples
from kvsearch.run.final_evaluation import FinalEvaluation, select_windows
from kvsearch.run.study_document import default_folder, study_of
from kvsearch.run.unfinished import so_far
from kvsearch.session import channel_importance, key_offsets, load, make_windows, make_workloads
from kvsearch.session import head_losses as heads
from kvsearch.session.learned import with_learned
from kvsearch.session.make_windows import MeasuredOn
from kvsearch.session.make_workloads import PromptSplits
from kvsearch.session.policies import values_of
from kvsearch.session.progress import Shown
from kvsearch.workloads.prompts.files import Record
from kvsearch.workloads.text.windows import Parts, Split

Records = dict[str, dict[Split, list[Record]]]
EXAMPLES = 4  # asks of a report whose answers are shown
LEAST_GAIN = 0.003  # nats per token, or shares of a context, see `studies/2026-11-first-answer`
LOOK_EVERY = 1.0  # seconds between looks at what is known while a search runs


class Run:
    """One run from options to a written report."""

    def __init__(self, options: RunConfig, shown: Shown) -> None:
        self.options, self.shown, self.start = options, shown, time.perf_counter()
        self._looked, self._first_answer = 0.0, False
        self.space, known, records = self._check()  # before the model, so that a typo shows at once
        first = evaluators.first(options.device, options.gpus_per_evaluator)
        self.loaded = load.model(
            replace(options, device=first), context=options.longest, say=shown.say
        )
        budget = options.budget(self.loaded.shape)
        texts, prompts = self._materials(records)
        self.setting = self._sized(budget, prompts)
        at("window", self.setting)  # raises if the budget is too small for it
        self._leave_out()
        self.space = key_offsets.possible(self.space, self.loaded)
        self.portfolio = inside(known, self.space)
        o = self.options  # from here on nothing of them changes
        if o.target is not None:
            self.portfolio += starts(o.target, self.space, self.setting)
        self.text = self._measured_on(budget, texts, prompts)
        self.workers = self._workers()
        self.work = evaluators.work(  # before the folder is written: it may be refused
            self.loaded, self.text.parts, batch=o.batch, workers=self.workers,
            ray=o.on_ray, device=o.device, gpus=o.gpus_per_evaluator,
        )  # fmt: skip
        self.study = study_of(
            o, self.loaded, self.text, self.setting, self.space, budget=budget,
            score_from=self.score_from, portfolio=[name for name, _ in self.portfolio],
        )  # fmt: skip
        self.folder = RunFolder(o.out or default_folder(self.study))
        try:
            self.resumed = self.folder.claim(self.study)
        except KvsearchError:
            self.folder.close()
            raise

    def go(self) -> Summary:
        """Run all stages; what an earlier run of the same command did is not done again."""
        shown, o = self.shown, self.options
        executor: Executor | None = None
        aside = ExitStack()
        try:
            load.kernels(self.loaded, shown.say)
            self.setting = with_learned(self._with_importance(), self.loaded)
            tune = o.engine == "tune"  # then `workers` and `ray` are for Tune; the rest runs here
            executor = evaluators.executor(
                self.loaded, self.work, workers=0 if tune else self.workers,
                ray=None if tune else o.ray, gpus=o.gpus_per_evaluator, say=shown.say,
            )  # fmt: skip
            times = o.bench and self.workers > 1 and self.loaded.device == "cpu"
            compiled = aside.enter_context(compiling(times))
            ratio = self._speed()  # before evaluators open, which share the device with the driver
            self.setting = self._with_offset(self._with_heads())
            trials = self._search(executor, ratio)
            extra = {f"extra{i}": (t.name, t.token_sha256) for i, t in enumerate(self.text.extra)}
            measured = FinalEvaluation(
                self.folder, executor, self.setting, self.score_from, shown, extra,
                {part: len(ids) for part, ids in self.text.parts.items()}, self.text.select,
                o.together, self.text.report, o.all_methods or o.target is not None,
            ).go(trials)  # fmt: skip
            executor.close()
            self.loaded = evaluators.unpark(self.loaded)
            compiled()
            self._bench(measured)
            first = Study.read(self.folder.path / "study.json")  # of a resumed run
            leads = summarise.comparison(self.folder, first, measured).leads()
            policies = {row.name: row.policy for row in measured.rows}
            self._examples(measured, {n: policies[n] for n in leads})
            measured.seconds, measured.resumed = time.perf_counter() - self.start, self.resumed
            write_atomic(self.folder.path / "measured.json", measured.text())
            built = summarise.build(self.folder, first, measured)
            result = replace(built, limits=summarise.limits_of(o))
            with shown.step("report", 1) as step:
                write(result, self.folder.path)
                step.advance()
            return result
        except KeyboardInterrupt:
            if executor is not None:
                executor.close()
            shown.say("stopping; the report of what is known follows")
            write(self.so_far(), self.folder.path)
            raise
        finally:
            if executor is not None:
                executor.close()
            aside.close()
            self.folder.close()

    def _workers(self) -> int:
        """Processes, or actors, that were asked for, or that suit the machine."""
        o = self.options
        if o.workers is not None or o.on_ray:
            return o.workers or 0
        each = o.together * self.setting.tokens
        return evaluators.processes(self.loaded, 2 * self._policies * each)  # search and report

    def so_far(self) -> Summary:
        """What an unfinished run knows by now, see `run/unfinished.py`."""
        return so_far(self.folder, self.study, time.perf_counter() - self.start)

    # -- before anything is written ------------------------------------------------------------

    def _check(self) -> tuple[SearchSpace, dict[str, Method], Records]:
        """The space, policies to begin with and records of prompts; raises for what cannot be."""
        o = self.options
        space = load_space(o.space_name)
        check_name(o.sampler)
        check_space(o.sampler, space)
        if o.target is not None:
            searched(o.target, on_prompts=not o.windowed)
        for name in o.exclude_method:
            find(name)
        known = load_portfolio(o.portfolio) if o.warm_start else {}
        evaluators.require(o)
        records = make_workloads.records(o)
        load.require_files(o.text, o.report_text, o.extra_text)
        return space, known, records

    def _materials(self, records: Records) -> tuple[Parts | None, PromptSplits | None]:
        """Parts of the text, and prompts; without prompts that are worth a context, text alone."""
        o, texts, prompts = self.options, None, None
        if o.windowed or o.specs():
            texts = make_windows.parts(self.loaded, o, self.shown.say)
        if o.asked:
            prompts = make_workloads.asked(self.loaded, o, records, texts, self.shown)
            if o.windowed and not prompts.worths["search"]:  # from here on it is a run on the text
                self.options = replace(o, tasks=(), prompts=(), text_only=True)
        return texts, prompts

    def _sized(self, budget: Budget, prompts: PromptSplits | None) -> Setting:
        """What policies are sized for: windows, or the longest of the prompts."""
        if self.options.windowed:
            return sized_for(self.loaded.shape, budget, self.options.context)
        assert prompts is not None, "a run has windows of a text, or prompts"
        lengths = make_workloads.lengths(prompts)
        return sized_for(self.loaded.shape, budget, *lengths, prompts=True)

    def _leave_out(self) -> None:
        """Exclude methods that are seldom ahead, and what the target cannot run."""
        o = self.options
        if o.target is not None:
            self.setting = stepped(o.target, self.setting)
            self.space, left_out = aim(o.target, self.space, self.setting)
            if left_out:
                self.shown.say(f"{o.target} cannot run {', '.join(left_out)}: left out")
        else:
            left_out = () if o.all_methods else SELDOM
        if left_out:
            exclude = tuple(dict.fromkeys((*o.exclude_method, *left_out)))
            self.options = replace(o, exclude_method=exclude)
        if o.target is not None:
            check_space(o.sampler, self.space)

    def _measured_on(
        self, budget: Budget, texts: Parts | None, prompts: PromptSplits | None
    ) -> MeasuredOn:
        """Windows of the text, prompts, or both together, in parts; sets `score_from`."""
        o, windows = self.options, None
        self.score_from = scored = o.first_scored(budget.slots) if o.windowed else 1
        if o.windowed:
            each = -(-self._each // o.count)  # windows; of other workloads there are as many
            chosen_on = select_windows(self._policies, each)
            windows = make_windows.text(self.loaded, o, self.shown.say, chosen_on, texts)
        if prompts is None or not prompts.worths["search"]:
            assert windows is not None, "a run has windows of a text, or prompts"
            return windows if prompts is None else replace(windows, left_out=prompts.left_out)
        joined = make_workloads.joined(self.loaded, o, prompts, windows, scored, self.shown)
        self.score_from = 1
        longest = max(part.longest for part in joined.parts.values())
        self.setting = replace(self.setting, tokens=max(self.setting.tokens, longest))
        return joined

    # -- stages --------------------------------------------------------------------------------

    def _with_heads(self) -> Setting:
        if not needs_heads(values_of(self.space)):
            return self.setting
        file, o = self.folder.path / "heads.json", self.options
        if not file.exists():
            found = heads.found(self.loaded, self.shown, o)
            write_atomic(file, head_losses.document(self.loaded, found))
        return replace(self.setting, heads=head_losses.read(file, self.loaded)[0])

    def _with_offset(self, setting: Setting) -> Setting:
        """Measures what keys have in common; where that is large, starting points go without it."""
        if not key_offsets.needs_offset(values_of(self.space)):
            return setting
        means = key_offsets.found(self.loaded, self.shown)
        if means.large:
            self.portfolio = key_offsets.without_offset(self.portfolio, self.space)
        return replace(setting, offset=means.offset(self.loaded.model, setting.tokens))

    def _with_importance(self) -> Setting:
        wanted = needs(values_of(self.space))
        if not wanted:
            return self.setting
        file = self.folder.path / "importance.json"
        if not file.exists():
            ids = self.text.parts[self._aside].beginnings
            found = channel_importance.measure(Evaluator(self.loaded), ids, wanted, self.shown.step)
            write_atomic(file, json.dumps(found.plain()) + "\n")
        return replace(self.setting, importance=channel_importance.read(file))

    def _speed(self) -> Callable[[Policy], float] | None:
        """The decode speed that the search goes by, if it does."""
        if not self._fast:
            return None
        ids = self.text.parts["search"].longest_ids
        return speed.model(self.loaded, self.setting, ids, self.folder.path, self.shown).ratio

    def _search(self, executor: Executor, ratio: Callable[[Policy], float] | None) -> list[Trial]:
        o = self.options
        context = Context(self.space, self.setting, ratio)
        task = Task(
            self.setting,
            self.score_from,
            self.space,
            o.most_trials,
            o.seed,
            lambda seed: make(o.sampler, seed, context),
            len(self.text.parts["search"]),
            warm_start=o.warm_start,
            exclude_method=o.exclude_method,
            portfolio=self.portfolio,
            together=o.together,
            enough=self._enough(context) if o.trials is None else None,
            speed=ratio,
        )
        with self.shown.step("search", self._policies, at_most=o.trials is None) as step:

            def watch(trial: Trial, trials: list[Trial]) -> None:
                counts = trial.state in ("complete", "failed") or trial.kind != "searched"
                self._stand(trials)
                step.advance(float(counts), trial.name)

            search = Search(task, executor, self.folder, watch)
            for done in search.trials:
                watch(done, search.trials)
            evaluators.park(self.loaded, executor)
            if o.engine == "tune":
                from kvsearch.policy_search import ray_tune

                trials = ray_tune.run(
                    search, self.work, slots=o.workers or 0, address=o.ray or "local"
                )
            else:
                trials = search.run()
        mattered = Kvei(o.seed % 2**32, context).importances(search.study.optuna_study)
        write_atomic(self.folder.path / "importances.json", json.dumps(mattered, indent=1) + "\n")
        return trials

    def _enough(self, context: Context) -> Callable[[optuna.Study], bool]:
        """Whether further proposals are worth less than anyone would notice."""
        model = Kvei(self.options.seed % 2**32, context)
        shares = bool(self.text.parts["search"].scales)
        unit = "of the context" if shares else "nats per token"

        def enough(study: optuna.Study) -> bool:
            gain = model.expected_gain(study)
            if gain < LEAST_GAIN:
                self.shown.say(
                    f"no further proposals: the best is expected to save {gain:.4f} {unit}, "
                    f"less than {LEAST_GAIN} (--trials N makes N)"
                )
            return gain < LEAST_GAIN

        return enough

    def _stand(self, trials: list[Trial]) -> None:
        """Show the best policy and its opponents by now; the first time, write the report."""
        if not any(t.state == "complete" for t in trials):
            return
        all_methods = len(trials) >= self._policies - self.options.most_trials
        first = all_methods and not self._first_answer
        if not first and time.perf_counter() - self._looked < LOOK_EVERY:
            return
        known = self.so_far()
        self.shown.stand(standing(known))
        if first:
            self._first_answer = True
            write(known, self.folder.path)
        self._looked = time.perf_counter()

    def _bench(self, measured: Measured) -> None:
        """Decode speed with the device to itself: of the whole front if speed is an objective."""
        for i, row in enumerate(measured.rows if self.options.bench else ()):
            if row.name == measured.recommended or (self._fast and row.kind == "searched"):
                ids = self.text.parts["report"].longest_ids
                title = f"decode speed {row.name}"
                decode = speed.measure(self.loaded, row.policy, ids, self.shown, title)
                measured.rows[i] = replace(row, decode=decode)

    def _examples(self, measured: Measured, policies: Mapping[str, Policy]) -> None:
        """Answers to prompts of the report, to be read beside each other."""
        part = self.text.parts["report"]
        if not part.asks or not policies:
            return
        keys = [policy.fingerprint(self.setting.shape.layers) for policy in policies.values()]
        known = [self.folder.load_nll("report", key).answers for key in keys]

        def told(number: int) -> int:
            """Answers of an item that the recommended policy gives and the published one loses."""
            exact = [a[number].exact for a in known[1:] if number < len(a)]
            pairs = zip(exact[0], exact[-1], strict=True) if exact else ()
            return sum(mine and not its for mine, its in pairs)

        asked = [i for i, item in enumerate(part.items) if item.asks]
        order = sorted(asked, key=told, reverse=True)
        with self.shown.step("examples", min(EXAMPLES, part.asks) * len(policies)) as step:
            measured.examples = examples(self.loaded, part, policies, order, EXAMPLES, step.advance)

    @property
    def _aside(self) -> str:
        """Name of the windows to measure channels on: others, if there are."""
        return "sensitivity" if "sensitivity" in self.text.parts else "search"

    @property
    def _each(self) -> int:
        """Windows that the search measures a policy on, on average; about two if they grow, and
        one where no proposals follow."""
        o = self.options
        often = 1 if o.trials is None else 2
        return often * o.together if o.grows else o.searched

    @property
    def _policies(self) -> int:
        """That the search may evaluate, methods included."""
        o = self.options
        first = baselines(o.warm_start, o.exclude_method, self.setting.prompt > 0)
        return len(self.portfolio) + len(first) + o.most_trials

    @property
    def _fast(self) -> bool:
        return "throughput" in self.options.objectives
