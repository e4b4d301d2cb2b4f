"""The policy that a runtime really runs when it is asked for another one.

An approximation is a policy too, so its bytes and its loss can be predicted and measured. What the
runtime lacks goes back to the policy's default, what it has in other sizes is rounded to them.
`project` is idempotent: a projected policy is one that the runtime executes as it is. One that does
something else than was asked says nothing of what was measured of that.
"""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

from kvsearch.errors import PolicyError
from kvsearch.exporters.capability import Capability, Eviction, Format, Ranking
from kvsearch.exporters.fields import FIELDS, active, value, with_value
from kvsearch.exporters.target import Proof, Target
from kvsearch.policy import Budgets, Channels, HeadTiers, ModelShape, Policy, Quantizer, Tier, check
from kvsearch.policy.policy import without_figures
from kvsearch.rules import Rule


def project(policy: Policy, target: Target, shape: ModelShape | None = None) -> Policy:
    """What `target` runs for `policy`.

    Args:
        policy: what is asked.
        target: the runtime.
        shape: of the model; without it, lists per layer and sizes of heads are not checked.

    Raises:
        PolicyError: the policy is not one for a model of this shape.
    """
    if shape is not None:
        check(policy, shape)
    if target.executes is None:
        lacks = () if target.sees(policy.active_rule) else ("rule",)
        return _at_defaults(policy, (*target.without, *lacks), shape)
    fields: dict[str, Any] = dict(policy, anchors=None, channels=Channels(), ladder=None)
    fields["refit"] = "none"
    stored, quantises = _stored(policy, target.executes, shape)
    how = target.executes.eviction
    if not policy.evicts or how is None:
        fields |= stored | dict(slots=None)
        if policy.budgets.kind == "adakv":
            fields["budgets"] = Budgets()
        if quantises:
            fields |= dict(trigger="stream", interval=1)
    else:
        if quantises and not how.quantised:
            stored = dict(tiers=(Tier(),), head_tiers=None, quantizer=_plain(policy))
            quantises = False
        fields |= stored | _evicted(policy, how, quantises, shape)
    rule = fields["rule"]
    if rule is not None and "rereading" in rule.needs and fields["trigger"] != "prompt":
        fields["rule"] = None  # it ranks nothing, and is refused all the same
    given = Policy.build({Policy.model_fields[k].alias or k: v for k, v in fields.items()})
    return _without_idle(policy, given, shape)


def its_own(policy: Policy, target: Target, shape: ModelShape | None) -> bool:
    """Whether the runtime's own cache types hold the policy as it is."""
    if target.own is None:
        return False
    return project(policy, replace(target, executes=target.own), shape) == policy


def proof_of(policy: Policy, target: Target, shape: ModelShape | None) -> Proof:
    """How far an export of a projected policy is proven: cache types of its own were not run."""
    return "schema" if policy.quantizes and its_own(policy, target, shape) else target.proof


def _at_defaults(policy: Policy, names: tuple[str, ...], shape: ModelShape | None) -> Policy:
    """The policy with some fields at their defaults; itself if they are there already."""
    lost = [name for name in names if value(policy, name) != FIELDS[name]]
    if not lost:
        return policy
    given = policy
    rule = policy.rule
    after = rule is not None and ("rereading" in rule.needs or policy.budgets.across == "model")
    if "rule" in lost or (after and "trigger" in lost):  # no prompt, nothing after it
        shares = Budgets() if policy.budgets.kind == "adakv" else policy.budgets
        given = policy.model_copy(update={"rule": None, "budgets": shares})
    for name in lost:
        given = with_value(given, name, FIELDS[name])
    return _without_idle(policy, Policy.build(given.model_dump(by_alias=True)), shape)


def _plain(policy: Policy) -> Quantizer:
    """The quantiser as asked, without what no runtime has: what rounds later, and an offset."""
    return policy.quantizer.model_copy(
        update=dict(along="channels", fp16_sinks=False, fp16_recent=False, offset=None)
    )


# -- storage -----------------------------------------------------------------------------------


def _stored(
    policy: Policy, can: Capability, shape: ModelShape | None
) -> tuple[dict[str, Any], bool]:
    """Tiers and quantiser, and whether anything is below 16 bits."""
    asked = _by_layer(policy)
    common = _most(asked)
    like = can.nearest(common, policy, shape)
    if like is None and can.layers != "alike":
        others = [t for t in asked if can.nearest(t, policy, shape) is not None]
        like = can.nearest(_most(others), policy, shape) if others else None
    quantizer = _plain(policy)
    if like is not None:
        quantizer = like.applied(quantizer, shape)
    given = [_given(can, t, policy, shape, like) for t in asked]
    if can.layers == "alike":
        given = [like.tier() if like is not None else Tier()] * len(given)
    if can.layers == "ends":
        given = _with_ends(given, quantizer.rotate)
    if like is not None and like.ends:
        assert shape is not None, "`fits` asks for it"
        asked, given = (x * (shape.layers // len(x)) for x in (asked, given))
        kept = [Tier()] * min(like.ends, shape.layers // 2)
        given = [*kept, *given[len(kept) : shape.layers - len(kept)], *kept]
    quantises = any(not t.native for t in given)
    out: dict[str, Any] = dict(quantizer=quantizer)

    def known(tier: Tier) -> bool:
        """Also one that no layer has, like the mean from which bits of layers were shared out."""
        return tier.native or tier == _given(can, tier, policy, shape, like)

    executed = all(known(tiers[0]) for tiers in policy.every_tiers) and not policy.ranks_tiers
    by_layer = policy.head_tiers is not None and not policy.head_tiers.per_head
    if given == asked and executed and by_layer and can.layers != "alike" and quantises:
        return out | dict(tiers=policy.tiers, head_tiers=policy.head_tiers), quantises
    if len({*given}) == 1:
        return out | dict(tiers=(given[0],), head_tiers=None), quantises
    kinds = [t for t, _ in Counter(given).most_common()]
    rest = tuple((t,) for t in kinds[1:])
    of = tuple(kinds.index(t) for t in given)
    return out | dict(tiers=(kinds[0],), head_tiers=HeadTiers(others=rest, of=of)), quantises


def _given(
    can: Capability, asked: Tier, policy: Policy, shape: ModelShape | None, like: Format | None
) -> Tier:
    """What a layer gets; all formats of a policy share one quantiser."""
    if like is None:
        return Tier()
    if can.layers == "exceptions":
        return Tier() if can.nearest(asked, policy, shape) is None else like.tier()
    found = can.nearest(asked, policy, shape, like=like, native=can.layers != "below")
    return Tier() if found is None else found.tier()


def _with_ends(asked: list[Tier], rotate: bool) -> list[Tier]:
    """The nearest tiers, of bits as many or more, of a first, a middle and a last run of layers."""
    keys = _in_runs([t.key_bits for t in asked], rotate)
    values = _in_runs([t.value_bits for t in asked], rotate)
    pairs = zip(keys, values, strict=True)
    return [Tier.model_validate(dict(key_bits=k, value_bits=v)) for k, v in pairs]


def _in_runs(bits: list[int], rotate: bool) -> list[int]:
    """Bits of keys, or of values; none are rotated beside a middle run in 16 bits."""
    count, found = len(bits), [max(bits)] * len(bits)
    for i, j in combinations(range(count + 1), 2):
        runs = bits[:i], bits[i:j], bits[j:]
        given = [max(run) for run in runs for _ in run]
        if sum(given) < sum(found) and not (rotate and given[i] == 16):
            found = given
    return found


def _by_layer(policy: Policy) -> list[Tier]:
    """One tier per layer: the largest of its list, and of KV heads that differ the finest.

    Where all layers are alike, a single one.
    """
    largest = [max(tiers, key=lambda t: t.share) for tiers in policy.every_tiers]
    largest = [t.model_copy(update={"share": 1.0}) for t in largest]
    if policy.head_tiers is None:
        return largest[:1]
    rows = [row if isinstance(row, tuple) else (row,) for row in policy.head_tiers.of]
    return [max((largest[i] for i in row), key=lambda t: t.key_bits + t.value_bits) for row in rows]


def _most(tiers: list[Tier]) -> Tier:
    return Counter(tiers).most_common(1)[0][0]


# -- eviction ----------------------------------------------------------------------------------


def _evicted(
    policy: Policy, how: Eviction, quantises: bool, shape: ModelShape | None
) -> dict[str, Any]:
    assert policy.slots is not None
    ranking = _ranking(policy.active_rule, how)
    rule, recent_sizes = ranking.rule, ranking.recent_window or how.recent_window
    sinks = (ranking.sinks or how.sinks).fit(policy.sinks)
    recent = recent_sizes.fit(policy.recent_window) if rule is not None else policy.recent_window
    slots = how.slots.fit(policy.slots)

    def interval_at(slots: int) -> int:
        if quantises and not how.exact_when_quantised:
            return 1
        sizes = ranking.interval or how.interval
        return sizes(slots, sinks) if callable(sizes) else sizes.fit(policy.interval)

    kept = max(sinks + recent, sinks + 1) + how.room
    interval = interval_at(slots)
    while slots < kept + interval:
        slots = how.slots.fit(kept + interval)
        interval = interval_at(slots)
    if rule is not None and policy.active_rule is None:  # the nearest to eviction by age
        left = slots - interval - sinks - how.room
        if not recent_sizes.only:
            recent = max(recent, left // recent_sizes.step * recent_sizes.step)
    positions = policy.positions if policy.positions in how.positions else how.positions[0]
    if quantises and not how.reindexes_quantised:
        positions = how.positions[0]
    fields: dict[str, Any] = dict(
        slots=slots,
        interval=interval,
        trigger=policy.trigger if policy.trigger in how.triggers else how.triggers[0],
        sinks=sinks,
        recent_window=recent,
        rule=rule,
        positions=positions,
        budgets=_budgets(policy.budgets, shape) if how.budgets else Budgets(),
    )
    return fields


def _ranking(asked: Rule | None, how: Eviction) -> Ranking:
    """That of the rule asked for, else of the nearest of its kind, else by age, else the first."""
    for r in how.rankings:
        if same_rule(asked, r.rule):
            return replace(r, rule=asked)
    kin = [
        r for r in how.rankings if r.rule is not None and asked is not None and _akin(r.rule, asked)
    ]
    if kin:
        return min(kin, key=lambda r: _distance(r.rule, asked))
    return next((r for r in how.rankings if r.rule is None), how.rankings[0])


def _distance(a: Rule | None, b: Rule | None) -> float:
    assert a is not None and b is not None
    at = b.features()
    return sum((v - at.get(name, 0.0)) ** 2 for name, v in a.features().items())


def same_rule(a: Rule | None, b: Rule | None) -> bool:
    """Whether two rules rank alike."""
    if a is None or b is None:
        return a is b
    return a.name == b.name and a.canonical() == b.canonical()


def _akin(a: Rule, b: Rule) -> bool:
    return isinstance(a, type(b)) or isinstance(b, type(a))


def _budgets(asked: Budgets, shape: ModelShape | None) -> Budgets:
    """Budgets of layers; KV heads that differ are added up."""
    if asked.kind == "adakv":
        return Budgets()
    if asked.kind != "sensitivity" or not asked.per_head:
        return asked
    rows = (row if isinstance(row, tuple) else (row,) for row in asked.weights)
    weights = tuple(float(f"{sum(w**asked.exponent for w in row):.6g}") for row in rows)
    return Budgets(kind="sensitivity", exponent=1.0, weights=weights)


# -- what is left ------------------------------------------------------------------------------


def _without_idle(asked: Policy, given: Policy, shape: ModelShape | None) -> Policy:
    """Fields that meant something and mean nothing any more, back at their defaults."""
    layers = None if shape is None else shape.layers
    for name in FIELDS:
        if value(given, name) == FIELDS[name] or active(given, name, layers):
            continue
        if value(given, name) != value(asked, name) or active(asked, name, layers):
            given = with_value(given, name, FIELDS[name])
    if given.rule is not None and "rereading" in given.rule.needs and given.trigger != "prompt":
        given = with_value(given, "rule", None)  # it ranks nothing, and is refused all the same
    if given.canonical(layers) != asked.canonical(layers):
        given = without_figures(given)
    try:
        return Policy.build(given.model_dump(by_alias=True))
    except PolicyError as e:  # pragma: no cover
        raise AssertionError(f"a projected policy is no policy: {e}") from e
