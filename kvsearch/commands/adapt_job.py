"""From a model and a policy to a trained model and its report: the work of `kvsearch adapt`."""

import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.commands.adapt_report import NLL, Adapted, compared
from kvsearch.commands.evaluated import write_nll
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.files import finite, write_atomic
from kvsearch.folders import drafted
from kvsearch.models import in_memory, surgery
from kvsearch.models.load import LoadedModel
from kvsearch.models.read import quiet, read
from kvsearch.models.shape import shape_of
from kvsearch.policy import Channels, Policy
from kvsearch.policy.policy import without_figures
from kvsearch.session.progress import Shown, Step
from kvsearch.train.loop import Trained, fit
from kvsearch.train.lora import closed, opened, trained_numbers
from kvsearch.train.new_token import with_new_token
from kvsearch.train.recipe import Recipe
from kvsearch.train.scheduled import Scheduled
from kvsearch.train.work import Work, saving
from kvsearch.workloads.text.windows import Tokens

FULL = Policy(name="full")


@dataclass(frozen=True, eq=False)
class Texts:
    """What is trained on and what is held out.

    Attributes:
        tokens, held: the texts.
        train, test: their windows `[W, T]`.
    """

    tokens: Tokens
    held: Tokens
    train: NDArray[np.int64]
    test: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Job:
    """One training, see `kvsearch.commands.adapt.adapt` for what the fields mean."""

    loaded: LoadedModel
    policy: Policy
    texts: Texts
    recipe: Recipe
    prompt: int
    channels_only: bool
    work: Work
    folder: Path
    shown: Shown

    def run(self) -> Adapted:
        """Measure, train, measure again, and write the folder."""
        rest = self.policy.model_copy(update={"channels": Channels()})
        with self.shown.step("measure before", 2) as step:
            losses = {"full_before": self._nll(self.loaded, FULL, step)}
            begun = self._begun()
            losses["before"] = self._nll(begun, rest, step)
        numbers, trained = self._train(begun, FULL if self.channels_only else rest)
        with self.shown.step("measure after", 2) as step:
            losses["after"] = self._nll(begun, rest, step)
            losses["full_after"] = self._nll(begun, FULL, step)
        found = Adapted(
            folder=str(self.folder),
            policy=rest.name or "",
            fingerprint=rest.fingerprint(begun.shape.layers),
            model=self.loaded.name,
            trained=self.recipe.words(),
            trained_numbers=numbers,
            steps=trained.steps,
            seconds=trained.seconds,
            text=self.texts.tokens.name,
            held_out=self.texts.held.name,
            windows=len(self.texts.test),
            context=self.texts.test.shape[1],
            **compared(losses, max(1, self.prompt)),
        )
        self._write(begun, self._left(rest, found), found, losses, trained)
        return found

    def _nll(self, on: LoadedModel, policy: Policy, step: Step) -> NLL:
        """Nats per token `[W, T - 1]` of held-out text."""
        found = Evaluator(on).quality(policy, self.texts.test, prompt=self.prompt, resident=False)
        if found.anchored is not None and not found.anchored.count:
            self.shown.say("warning: the held-out text has no anchors, so no sequence closes")
        step.advance()
        return found.nll

    def _begun(self) -> LoadedModel:
        """The model as training finds it: without the policy's channels, with its new token."""
        loaded = self.loaded
        if self.policy.channels.active:
            model = self._pruned()
        else:  # a model of the caller's stays as it is
            model = deepcopy(loaded.model) if loaded.in_memory else loaded.model
        begun = replace(loaded, model=model.eval(), shape=shape_of(model.config))
        begun = with_new_token(begun, self.policy)
        return replace(begun, digest=in_memory.digest(begun.model), name=f"{begun.name}, adapted")

    def _pruned(self) -> Any:
        """What `kvsearch prune` writes, read again: it shares no weights with the given model."""
        loaded, folder = self.loaded, self.work.path / "pruned"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with quiet():
                small = surgery.prune(loaded.model.to("cpu"), self.policy.channels)
                with saving(folder):
                    surgery.write(small, loaded.tokenizer, folder)
            return read(folder, getattr(torch, loaded.dtype))[0].to(loaded.device)
        finally:
            loaded.model.to(loaded.device)
            shutil.rmtree(folder, ignore_errors=True)

    def _train(self, begun: LoadedModel, under: Policy) -> tuple[int, Trained]:
        """Train the model in place; returns how many numbers were trained, too."""
        how, kind, last = self.recipe, getattr(torch, begun.dtype), self.work.last()
        native = kind if kind.itemsize == 2 else None
        scheduled = Scheduled(under, begun, prompt=self.prompt, native=native)
        examples = scheduled.examples(self.texts.train)
        model = opened(begun.model.float(), how, begun.silent)
        numbers = trained_numbers(model)
        self.shown.say(
            f"training {how.words()} ({numbers:,} numbers) under {under.name!r} on "
            f"{len(examples)} windows of {self.texts.train.shape[1]} tokens; checkpoints in "
            f"{self.work.path}" + (f", going on after step {last.step}" if last else "")
        )
        total, at = float(how.most or 60 * (how.minutes or 0)), 0.0
        with self.shown.step("train" if how.most else "train (seconds)", total) as step:

            def told(number: int, loss: float, seconds: float) -> None:
                nonlocal at
                now = min(total, float(number if how.most else round(seconds)))
                step.advance(now - at, note=f"step {number}, loss {loss:.3f}")
                at = now

            bf16 = kind is torch.bfloat16
            trained = fit(model, scheduled, examples, how, self.work, bf16=bf16, told=told)
        closed(model, how).to(kind)
        return numbers, trained

    def _left(self, rest: Policy, found: Adapted) -> Policy:
        """The policy for the trained model, and where it came from."""
        about: dict[str, Any] = {
            **without_figures(rest).about,  # those were measured on the model before
            "adapted": {"model": found.model, "trained": found.trained, "steps": found.steps,
                        "text": found.text},
        }  # fmt: skip
        if self.policy.channels.active:
            about["channels"] = self.policy.channels.model_dump(mode="json")
        return rest.model_copy(update={"about": about})

    def _write(
        self,
        made: LoadedModel,
        policy: Policy,
        found: Adapted,
        losses: Mapping[str, NLL],
        trained: Trained,
    ) -> None:
        """All files under another name first."""
        with saving(self.folder), drafted(self.folder) as draft:
            with quiet():
                surgery.write(made.model, made.tokenizer, draft)
            write_atomic(draft / "policy.json", policy.to_json())
            about = json.dumps(finite(asdict(found)), indent=2, allow_nan=False)
            write_atomic(draft / "adapt.json", about + "\n")
            names = list(trained.losses[0])
            rows = [",".join(f"{x[k]:.9g}" for k in names) for x in trained.losses]
            write_atomic(draft / "losses.csv", "\n".join([",".join(names), *rows]) + "\n")
            write_nll(draft / "nll.parquet", list(losses.items()), self.texts.test)
