"""A retention rule of your own, from outside the package: slots with large values stay.

    python docs/examples/own_rule.py            # SmolLM2-135M
    python docs/examples/own_rule.py --smoke    # a tiny random model, seconds

A rule describes what it reads and what it holds; its scorer ranks the slots of a layer at a
compaction. With a line in `RULES`, policies with the rule can be evaluated, written to files, and
run in `generate()` like any other. `kvsearch/rules/base.py` has all that a rule can say.
"""

from typing import ClassVar

from tiny import SMOKE, text, tiny
from torch import Tensor

import kvsearch
from kvsearch.rules import RULES
from kvsearch.rules.base import Need, Place, Rule, Scorer, Slots


class ValueNorm(Rule):
    """Rank by the L2 norm of the value as it is held; nothing is held beside the cache."""

    name: str = "value-norm"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    def scorer(self, place: Place) -> "ValueNormScorer":
        """Stateless, so the same for every layer."""
        return ValueNormScorer()


class ValueNormScorer(Scorer):
    """Reads the values at each compaction."""

    def ranks(self, slots: Slots) -> Tensor:
        """`||v||_2` per slot `[B, H, N]`; higher stays."""
        return slots.read()[1].float().norm(dim=-1)


RULES["value-norm"] = ValueNorm

size = dict(slots=48, interval=16, recent_window=16)
mine = kvsearch.Policy(**size, rule=ValueNorm(), name="value-norm")
by_age = kvsearch.Policy(**size, name="by age")
read_back = kvsearch.Policy.parse(mine.to_json())  # files hold the rule by its name
assert read_back.fingerprint() == mine.fingerprint()

loaded = tiny() if SMOKE else kvsearch.load_model("smollm2-135m")
found = kvsearch.evaluate(
    [read_back, by_age], loaded, text(), context=256, score_from=64, windows=2
)
print(found.to_frame()[["policy", "dnll_full", "dnll_full_lo", "dnll_full_hi", "bytes_peak"]])
