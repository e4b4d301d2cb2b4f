"""What a policy loses on a part: on its windows, its prompts, or both."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kvsearch.evaluation.answers import answered, answers
from kvsearch.evaluation.measurement import Answered, Measurement
from kvsearch.evaluation.quality import Evaluator
from kvsearch.policy import Policy
from kvsearch.workloads.parts import Part


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
        part: the items; windows have one length, and share a rectangular pass.
        resident: also pack the cache and count its bytes.
        full: `Answers.log` of the full cache, for divergences from it.

    Raises:
        KvsearchError: a loss is not finite, or the policy cannot run on prompts.
        OutOfMemory: the device has no room.
    """
    windows = [i for i, item in enumerate(part.items) if not item.asks]
    asked = [i for i, item in enumerate(part.items) if item.asks]
    read = list[Measurement]()
    by_number = dict[int, Answered]()
    if windows:
        ids = np.stack([part.items[i].context for i in windows])
        read.append(evaluator.quality(policy, ids, resident=resident))
        if not part.scales:
            return read[0]
        means = read[0].nll[:, part.score_from - 1 :].astype(np.float64).mean(1)
        by_number |= {
            i: Answered(part.of[i], part.items[i].group, part.weights[i], [], [], nll=float(nll))
            for i, nll in zip(windows, means, strict=True)
        }
    if asked:
        some = part.only(asked)
        found = answers(evaluator, policy, some, resident=resident, full=full)
        by_number |= zip(asked, answered(some, found, some.of, some.weights), strict=True)
        again = policy.rereads
        taken_in = sum(item.taken_in(some.see, again=again) for item in some.items)
        nothing = np.empty((0, 1), np.float32)
        read.append(Measurement(nothing, taken_in, found.bytes_end, found.seconds, found.impls))
    rows = [by_number[i] for i in range(len(part))]
    nll = np.array([row.nll for row in rows], np.float64) * part.scales
    return Measurement(
        nll=nll.astype(np.float32)[:, None],
        tokens=sum(x.tokens for x in read),
        bytes_resident=max(x.bytes_resident for x in read),
        seconds=sum(x.seconds for x in read),
        impls={op: impl for x in read for op, impl in x.impls.items()},
        answers=tuple(rows),
    )
