"""One op that goes through all intervals evicts what turns of torch's operations evict."""

from typing import Any

import pytest
import torch

from kvsearch.policy import Policy, Quantizer, Tier
from kvsearch.rules import Attention
from kvsearch_kernels.evict_in_place import evict_in_place
from kvsearch_kernels.op import Op
from tests.test_turns import POLICIES as TURNS
from tests.test_turns import evaluate, policy_of

SERVED = {
    "XMU's correction": TURNS["XMU's correction"],
    "every token": TURNS["every token"],
    "decay, a recent window in the way": TURNS["decay, a recent window in the way"],
    "only the last rows": Policy(slots=60, interval=8, rule=Attention(horizon=5, beta=2)),
    "sinks and quantised": Policy(
        slots=60, interval=8, sinks=4, recent_window=4, rule=Attention(alpha=0.5),
        tiers=(Tier(key_bits=4, value_bits=4),), quantizer=Quantizer(group=16),
    ),
}  # fmt: skip
NOT_SERVED = ("a window of intervals", "smoothed, one vote", "tova")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The op's reference serves, as a kernel would; what it is given is noted."""
    found: list[Any] = []
    pick, again = Op.pick, Op.again

    def picked(op: Op[Any, Any], *args: Any, **kwargs: Any) -> str:
        return "kernel" if op is evict_in_place else pick(op, *args, **kwargs)

    def carried_out(op: Op[Any, Any], impl: str, *args: Any, **kwargs: Any) -> Any:
        if op is not evict_in_place:
            return again(op, impl, *args, **kwargs)
        found.append(args)
        return op.reference(*args)

    monkeypatch.setattr("kvsearch.cache.one_by_one.serves", lambda *_: False)
    monkeypatch.setattr(Op, "pick", picked)
    monkeypatch.setattr(Op, "again", carried_out)
    return found


@pytest.mark.parametrize("name", SERVED)
def test_it_evicts_what_turns_evict(
    name: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs after the last compaction too, so what is in the slots is right."""
    got = evaluate(SERVED[name], more=7)
    assert asked
    monkeypatch.undo()
    monkeypatch.setattr("kvsearch.cache.one_by_one.serves", lambda *_: False)
    want = evaluate(SERVED[name], more=7)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_it_does_not_serve(name: str, asked: list[Any]) -> None:
    evaluate(policy_of(name))
    assert not asked
