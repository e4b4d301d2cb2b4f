"""What policies answer, word for word, for the page of a report."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from kvsearch.evaluation.answers import spoken
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy
from kvsearch.results.records import Example
from kvsearch.workloads.measured_parts import Part

MORE = 8  # tokens of an example beyond the reference


LONGEST_QUESTION = 80  # tokens of a question that an example shows


def examples(
    loaded: LoadedModel,
    part: Part,
    policies: Mapping[str, Policy],
    order: Sequence[int],
    count: int,
    progress: Callable[[], None],
) -> list[Example]:
    """What policies answer to a few asks of a part, with room for a few words more.

    Asks of one context share its reading.

    Args:
        loaded: the model.
        part: of the report.
        policies: by name.
        order: numbers of the items, those first whose answers tell most.
        count: asks.
        progress: called after every answer.
    """
    evaluator, found, decode = Evaluator(loaded), list[Example](), loaded.tokenizer.decode
    for i in order:
        item, left = part.items[i], count - len(found)
        apart = takewhile(lambda ask: not ask.follows, item.asks[1:])
        asks = [*item.asks[:1], *apart][: 1 if part.see == "aware" else max(0, left)]
        tokens, said = [ask.answer.size + MORE for ask in asks], dict[str, list[str]]()
        for name, policy in policies.items() if left > 0 else ():
            said[name] = [decode(x) for x in spoken(evaluator, policy, item, part.see, tokens)]
            for _ in asks:
                progress()
        for j, ask in enumerate(asks if left > 0 else ()):
            asked = ask.question if ask.question.size else item.context
            question, reference = decode(asked[-LONGEST_QUESTION:]), decode(ask.answer)
            its = {name: words[j] for name, words in said.items()}
            found.append(Example(part.of[i], question.strip(), reference.strip(), its))
    return found
