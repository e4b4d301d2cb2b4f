"""Fitting a rule with weights to a model: `kvsearch adapt --rule`."""

import json
import time
from dataclasses import asdict, dataclass

import numpy as np

from kvsearch.errors import KvsearchError, TextError, nearest, quoted
from kvsearch.files import require_writable, write_atomic
from kvsearch.folders import drafted, require_new
from kvsearch.models import learned
from kvsearch.options.budget import BudgetConfig, sized_for
from kvsearch.options.function import takes
from kvsearch.options.other_commands import LearnConfig
from kvsearch.policy_space.methods import at
from kvsearch.rules import RULES, KVzap
from kvsearch.rules.kvzap import file_of
from kvsearch.session import make_windows
from kvsearch.session.session import Session
from kvsearch.train.kvzap import fit
from kvsearch.train.work import saving
from kvsearch.workloads.text import windows as cut_windows

CONTEXTS, HELD_OUT = 64, 0.1  # that are learned from, and share of the text that is predicted
SIZE = 4  # tokens of a context that come to a slot, where no budget is given


@dataclass(frozen=True)
class Fitted:
    """What `learn` fitted.

    Attributes:
        folder: has `policy.json`, the weights beside it, and this as `learned.json`.
        rule: its name.
        weights: SHA-256 of the file with the weights.
        model: that they are for.
        text: that they were learned from.
        contexts, context: how many, and tokens of each.
        held_out: contexts of the last part of the text, or of another one, that are predicted.
        explained: share of the variance of the scores' logarithms there that is predicted, mean
            over KV heads; 1 is all of it.
        slots: of the policy.
        seconds: of reading and fitting.
    """

    folder: str
    rule: str
    weights: str
    model: str
    text: str
    contexts: int
    context: int
    held_out: int
    explained: float
    slots: int
    seconds: float

    def table(self) -> str:
        """A few lines for people."""
        return (
            f"{self.rule} for {self.model}: {self.contexts} contexts of {self.context} tokens of "
            f"{self.text} in {self.seconds:.0f} s\n"
            f"predicts {self.explained:.2f} of the variance of log scores in {self.held_out} "
            f"others\n{self.folder}/policy.json has {self.slots} slots; {file_of(self.weights)} "
            "beside it has the weights\n"
            f"kvsearch eval {self.folder}/policy.json --model {self.model}"
        )


@takes(LearnConfig)
def learn(config: LearnConfig) -> Fitted:
    """Fit the weights of a rule to a model, and write them beside a policy with the rule.

    Returns:
        What was fitted, and how well it predicts.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence.
    """
    rule, context = config.rule, config.context
    if rule not in RULES or "hidden" not in RULES[rule].needs:
        raise KvsearchError(f"rule {quoted(rule)} has no weights{nearest(rule, ('kvzap',))}")
    folder = config.out
    require_new(folder)
    session = Session(config)
    require_writable(folder)
    loaded, shown = session.load(context=context), session.shown
    budget = config if config.sized else BudgetConfig(budget_slots=context / SIZE)
    policy = at(rule, sized_for(loaded.shape, budget.budget(loaded.shape), context))
    tokens, held = make_windows.held_out(
        loaded, config.text, config.dataset, config.held_out, HELD_OUT, shown.say
    )
    span = max(1, context - len(tokens.start))
    count = min(config.steps or CONTEXTS, tokens.ids.size // span)
    others = min(config.windows or max(1, round(HELD_OUT * count)), held.ids.size // span)
    if not count or not others:
        raise TextError(
            f"the text has no {context} tokens to learn from and as many to predict; give a longer "
            "one, or lower --context"
        )
    rows, rest = (
        cut_windows(x, count=n, length=context) for x, n in ((tokens, count), (held, others))
    )
    start = time.perf_counter()
    with shown.step(f"{rule}: read {count + others} contexts twice", count + others) as step:
        found = fit(loaded, rows, rest, step.advance)
    data = found.learned.encoded()
    sha256 = learned.keep(data, loaded.model)
    policy = policy.model_copy(update={"rule": KVzap(weights=sha256)})
    assert policy.slots is not None
    done = Fitted(
        str(folder), rule, sha256, loaded.name, tokens.name, count, context, others,
        float(np.mean(found.explained)), policy.slots, time.perf_counter() - start,
    )  # fmt: skip
    with saving(folder), drafted(folder) as draft:
        write_atomic(draft / file_of(sha256), data)
        write_atomic(draft / "policy.json", policy.to_json())
        write_atomic(draft / "learned.json", json.dumps(asdict(done), indent=2) + "\n")
    return done
