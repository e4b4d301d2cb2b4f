"""What a policy keeps: facts hidden in the report text, asked for after the context.

A table of perplexities does not tell whether a policy forgets what is asked for later.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.quality import Evaluator
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy
from kvsearch.records import Needles
from kvsearch.workloads import make, parse
from kvsearch.workloads.encode import encoded, start_of
from kvsearch.workloads.items import Ids
from kvsearch.workloads.tasks import Material

CONTEXTS, FACTS = 2, 4  # every fact is asked for
AFTER = 64  # tokens that question and answer may take


def measure(
    loaded: LoadedModel,
    prose: Ids,
    tokens: int,
    policies: Mapping[str, Policy],
    progress: Callable[[], None],
) -> Needles:
    """How many facts each policy keeps, question-agnostic.

    Args:
        loaded: the model.
        prose: token ids of the text that the facts are hidden in, without special tokens.
        tokens: of a window; contexts with an answer are at most as long.
        policies: by name.
        progress: called after every context.

    Raises:
        KvsearchError: a window has no room for the facts, or a policy cannot run on prompts.
    """
    spec = parse(f"needle:{FACTS},asks={FACTS},tokens={max(1, tokens - AFTER)}")
    ids, start = np.asarray(prose), start_of(loaded)
    given = Material(partial(encoded, loaded), start, ids, spec.tokens, "report")
    asked = make(spec, given, CONTEXTS, "agnostic")
    evaluator = Evaluator(loaded)
    exact = {
        name: int(answers(evaluator, policy, asked, resident=False, progress=progress).exact.sum())
        for name, policy in policies.items()
    }
    return Needles(spec.tokens, asked.asks, exact)
