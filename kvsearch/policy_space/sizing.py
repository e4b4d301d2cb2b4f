"""How many slots a budget pays for: from knobs to a policy of a given size."""

from collections.abc import Mapping
from typing import Any

from kvsearch.errors import PolicyError
from kvsearch.policy import Policy, check, layout
from kvsearch.policy.budgets import least
from kvsearch.policy.layout import costs_of, kinds_of, peak_of
from kvsearch.policy_space.axes import KNOBS, Value, check_value
from kvsearch.policy_space.by_head import SIZED
from kvsearch.policy_space.to_policy import Get, Setting, budgets_of, policy_of, recent_window_of

MANY = 1 << 12  # slots over which the bytes of one are averaged
DEFAULTS = {name: knob.default for name, knob in KNOBS.items()}
STEPS = 8  # guesses at the slots that a budget pays for, before halving takes over


def build(knobs: Mapping[str, Value], setting: Setting, name: str | None = None) -> Policy:
    """The policy that `knobs` describe, with as many slots as the budget pays for.

    Raises:
        PolicyError: an unknown knob or value, or a budget too small for what is never evicted.
    """
    return sized(knobs, setting, name)[0]


def sized(
    knobs: Mapping[str, Value], setting: Setting, name: str | None = None
) -> tuple[Policy, int]:
    """What `build` makes, and its peak in bytes, which finding its slots has already told."""
    for knob, value in knobs.items():
        if reason := check_value(knob, value):
            raise PolicyError(f"knob {knob}: {reason}")
    get: Get = DEFAULTS | dict(knobs)
    if not get["evict"]:
        policy = policy_of(get, setting, None, name)
        return policy, layout(policy, setting.shape).bytes_peak(setting.tokens, setting.prompt)
    if setting.budget_bytes is None:
        raise PolicyError("a budget is needed to size this policy")
    limit = int(setting.budget_bytes * float(get["budget_fraction"] or 0))
    return _largest(get, setting, limit, name)


def _largest(get: Get, setting: Setting, limit: int, name: str | None) -> tuple[Policy, int]:
    """The policy with the most slots whose peak is at most `limit` bytes, and that peak.

    The policy is validated once: only slots, a recent window that is a share of them, and budgets
    of `SIZED` differ between the sizes tried.
    """
    base = policy_of(get, setting, 2, name)

    def of(slots: int) -> Policy:
        update: dict[str, Any] = {"slots": slots}
        update["recent_window"] = recent_window_of(get, setting, slots)
        if get["budgets"] in SIZED:
            update["budgets"] = budgets_of(get, setting, slots)
        return base.model_copy(update=update)

    costs, kinds = costs_of(base, setting.shape), kinds_of(base, setting.shape)
    few = 1  # the recent window may grow with the slots, and the least slots with those
    while (need := least(base, setting.shape, recent_window_of(get, setting, few))) > few:
        few = need
    low, high = few - 1, 1 << (4 * setting.tokens - 1).bit_length()
    residual = base.interval if base.compacts else 0
    each = [(kinds.count(i), cost) for i, cost in enumerate(costs)]
    many, more = (sum(n * c.bytes(x, residual, None) for n, c in each) for x in (MANY, 2 * MANY))
    slope = (more - many) / MANY
    guess = MANY + residual + (limit - many) / slope
    turn = peak = 0
    while low + 1 < high:
        mid = min(max(int(guess), low + 1), high - 1) if turn < STEPS else (low + high) // 2
        there = of(mid)
        if there.fp16_recent != base.fp16_recent:  # tokens in no tier
            costs = costs_of(there, setting.shape)
        held = peak_of(there, setting.shape, costs, setting.tokens, setting.prompt)
        low, high, peak = (low, mid, peak) if held > limit else (mid, high, held)
        step = (limit - held) / slope  # nearly linear; at least one slot on, which quantises it
        guess = mid + (max(1.0, step) if step >= 0 else min(-1.0, step))
        turn += 1
    if low >= few + setting.slot_room:
        slots = low // setting.slot_step * setting.slot_step
        policy = of(slots)
        if slots == low:
            return policy, peak
        if slots >= few + setting.slot_room:
            return policy, peak_of(
                policy, setting.shape, costs_of(policy, setting.shape), setting.tokens,
                setting.prompt,
            )  # fmt: skip
    reason = f"{limit} bytes pay for no slot"
    if low >= few:
        reason = (
            f"{limit} bytes pay for {low} slots, and this runtime needs {few + setting.slot_room} "
            f"or more, a multiple of {setting.slot_step}"
        )
        raise PolicyError(f"budget too small: {reason}")
    policy = of(low)
    if base.trigger == "generation" and setting.prompt:
        stays = f"a prompt of {setting.prompt} tokens, which stays"
        raise PolicyError(f"budget too small: {limit} bytes pay for no slots beside {stays}")
    if base.after_prompt and not setting.prompt:
        check(base, setting.shape, prompt=setting.prompt)  # without a prompt nothing is dropped
    try:
        layout(policy, setting.shape)
    except PolicyError as e:
        reason = str(e)
    raise PolicyError(f"budget too small: {reason}")
