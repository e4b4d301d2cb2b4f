"""Every policy that was ever kept does what it did: same slots, same bytes, same NLL in float64.

`golden/nll.jsonl` was made before rules, schedule and engine came apart: the golden files, what the
studies recommend, and one trial of each kind that the studies searched. Losses of 15 of them were
made anew when all slots of a short text came to count as recent (25 November 2026), and three have
another fingerprint since a recent window counts with uneven budgets (26 November). All are sized
and compared here; the golden files and every seventh (marked slow) are also run, or all with
KVSEARCH_GOLDEN=all (minutes).

A processor that sums in another order can flip a rank or a code, and with it a loss: then all that
can be compared is two commits on one machine (`golden_values.py`).
"""

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from kvsearch.policy import Policy, layout
from tests import golden_values
from tests.golden_values import RECORDS, SHAPE, T, values

ALL = os.environ.get("KVSEARCH_GOLDEN") == "all"
RUN = [
    pytest.param(r, id=r["name"], marks=[pytest.mark.slow] * (not kept))
    for i, r in enumerate(RECORDS)
    if (kept := "golden/" in r["name"]) or i % 7 == 0 or ALL
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return golden_values.model()


def same(found: list[int | None], kept: Any) -> bool:
    return found == (kept if isinstance(kept, list) else [kept] * SHAPE.layers)


def test_every_kept_policy_has_its_slots_bytes_and_identity() -> None:
    assert len(RECORDS) > 130
    for r in RECORDS:
        policy = Policy.build(r["policy"])
        sizes = layout(policy, SHAPE)
        assert policy.fingerprint(SHAPE.layers) == r["fingerprint"], r["name"]
        assert same([x.slots for x in sizes.layers], r["slots"]), r["name"]
        assert sizes.bytes_peak(T) == r["peak"], r["name"]
        assert Policy.parse(policy.to_json()) == policy


@pytest.mark.parametrize("record", RUN)
def test_a_kept_policy_keeps_its_slots_and_loses_what_it_lost(
    record: dict[str, Any], model: LlamaForCausalLM
) -> None:
    found = values(record, model)
    assert same(found["held"], record["held"])
    if not near(found, record):  # a processor that sums in another order: ask with other sums
        found = elsewhere(record["name"])
        assert same(found["held"], record["held"])
    assert near(found, record), (found["nll"], record["nll"])


def near(found: dict[str, Any], kept: dict[str, Any]) -> bool:
    return float(np.abs(np.subtract(found["nll"], kept["nll"])).max()) < 1e-9


def elsewhere(name: str) -> dict[str, Any]:
    """The values of a policy with torch's AVX2 code, in a process of its own."""
    done = subprocess.run(
        [sys.executable, golden_values.__file__, name],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found
