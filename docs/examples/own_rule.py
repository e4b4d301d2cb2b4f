"""A retention rule of your own, from outside the package: slots with large values stay.

    python docs/examples/own_rule.py            # SmolLM2-135M
    python docs/examples/own_rule.py --smoke    # a tiny random model, seconds

A function that ranks the slots of a layer is enough for a rule that holds nothing beside the cache.
In a package, an entry point of the group `kvsearch.rules` takes the place of the line with `RULES`,
and the command line knows the rule. One that holds sums, or that a search varies, is a class:
`kvsearch/rules/base.py` has all that it can say.
"""

from tiny import SMOKE, text, tiny

import kvsearch
from kvsearch.rules import RULES, ranked_by


def value_norm(slots):
    """`||v||_2` per slot `[B, H, N]`; higher stays."""
    return slots.read()[1].float().norm(dim=-1)


RULES["value-norm"] = ValueNorm = ranked_by(value_norm, needs={"values"})
size = dict(slots=48, interval=16, recent_window=16)
mine = kvsearch.Policy(**size, rule=ValueNorm(), name="value-norm")
by_age = kvsearch.Policy(**size, name="by age")
loaded = tiny() if SMOKE else kvsearch.load_model("smollm2-135m")
how = dict(context=256, score_from=64, windows=2)
found = kvsearch.evaluate([kvsearch.Policy.parse(mine.to_json()), by_age], loaded, text(), **how)
print(found.to_frame()[["policy", "dnll_full", "dnll_full_lo", "dnll_full_hi", "bytes_peak"]])
