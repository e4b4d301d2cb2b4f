"""What the measured layers say of a policy's slots per layer before any such policy was tried.

For a while kvei's model was fitted to what this leaves of the loss. It foretold better
(`predict.csv`) and found nothing better (`texts-summary.csv`), so it is here and not there.
"""

from math import log10

from kvsearch.knobs import Setting
from kvsearch.policy import Policy, layout


def starvation(policy: Policy, setting: Setting, fall: float = 1.5) -> float:
    """log10 of what the layers should lose under this share-out of slots, over an even one.

    Each layer is taken to lose its measured harm, and less with more slots. The least is at an
    exponent of about 1 / (1 + `fall`). A model without this, that has seen the exponents 0.125 and
    1, expects the better of the two to be the best of all.

    Args:
        policy: built for `setting`.
        setting: with the sensitivity; where nothing is evicted, the answer is 0.
        fall: power of its slots with which a layer's loss falls.
    """
    harm, most = setting.sensitivity, setting.tokens
    if not harm or policy.slots is None or policy.spread.kind == "uniform":
        return 0.0
    slots = [min(n or most, most) for n in layout(policy, setting.shape).slots]
    mean = sum(slots) / len(slots)
    lost = sum(h * (mean / n) ** fall for h, n in zip(harm, slots, strict=True))
    return log10(lost / sum(harm))
