"""What a policy loses on a part: on its windows, its prompts, or both.

A window that is also the context of questions goes through the model once.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.evaluation.answers import answered, answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.policy import Policy
from kvsearch.results.measurement import Answered, Measurement
from kvsearch.workloads.items import Item
from kvsearch.workloads.measured_parts import Part

Nll = NDArray[np.float32]


def losses(
    evaluator: Evaluator,
    policy: Policy,
    part: Part,
    *,
    resident: bool = False,
    full: Sequence[Tensor] | None = None,
) -> Measurement:
    """Replay a policy on the items of a part.

    Args:
        evaluator: of the model.
        policy: what to replay.
        part: the items; windows have one length, and share a rectangular pass, unless the context
            of an item with questions is the same array.
        resident: also pack the cache and count its bytes.
        full: `Answers.log` of the full cache, for divergences from it.

    Raises:
        KvsearchError: a loss is not finite, or the policy cannot run on prompts.
        OutOfMemory: the device has no room.
    """
    windows = [i for i, item in enumerate(part.items) if not item.asks]
    asked = [i for i, item in enumerate(part.items) if item.asks]
    read = list[Measurement]()
    by_number, nll = dict[int, Answered](), dict[int, Nll]()
    contexts = {id(part.items[i].context) for i in asked if part.see == "agnostic"}
    shared = [i for i in windows if id(part.items[i].context) in contexts]
    if apart := [i for i in windows if i not in shared]:
        ids = np.stack([part.items[i].context for i in apart])
        read.append(evaluator.quality(policy, ids, resident=resident))
        if not part.scales:
            return read[0]
        nll |= zip(apart, read[0].nll, strict=True)
    if asked:
        some = part.only(asked)
        found = answers(
            evaluator, policy, some, resident=resident, full=full, read=bool(shared)
        )  # fmt: skip
        if shared:
            own = {id(x.context): y for x, y in zip(some.items, found.read, strict=True)}
            nll |= {i: own[id(part.items[i].context)] for i in shared}
        by_number |= zip(asked, answered(some, found, some.of, some.weights), strict=True)
        again = policy.rereads
        taken_in = sum(item.taken_in(some.see, again=again) for item in some.items)
        nothing = np.empty((0, 1), np.float32)
        read.append(Measurement(nothing, taken_in, found.bytes_end, found.seconds, found.impls))
    for i in windows:
        item, weight = part.items[i], part.weights[i]
        lost = float(scored(nll[i], item, part.score_from).mean())
        by_number[i] = Answered(part.of[i], item.group, weight, [], [], nll=lost)
    rows = [by_number[i] for i in range(len(part))]
    shares = np.array([row.nll for row in rows], np.float64) * part.scales
    return Measurement(
        nll=shares.astype(np.float32)[:, None],
        tokens=sum(x.tokens for x in read),
        bytes_resident=max(x.bytes_resident for x in read),
        seconds=sum(x.seconds for x in read),
        impls={op: impl for x in read for op, impl in x.impls.items()},
        answers=tuple(rows),
    )


def scored(nll: Nll, window: Item, score_from: int) -> NDArray[np.float64]:
    """The losses of a window that count, nats a token.

    Args:
        nll: of its tokens `[T - 1]`.
        window: the window.
        score_from: first scored position; of facts that are hidden in the text, none is scored.
    """
    some = nll[score_from - 1 :].astype(np.float64)
    return some if window.prose is None else some[window.prose[score_from:]]
