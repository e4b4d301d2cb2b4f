"""Sums of received attention (H2O, TOVA, SnapKV, XMU): what most published rules are.

Sums are held raw; corrections for age and window are applied when ranking, so that they can change
without touching the sums. All ranks are at least 0, on which the `scan` replay relies.
"""

from collections.abc import Mapping
from functools import partial
from math import log2
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvsearch.errors import PolicyError
from kvsearch.rules.base import Need, Place, Rule, Scorer, Segment, Slots
from kvsearch.rules.running import RunningSums

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUM_BYTES = 4  # fp32: an fp16 sum would stop growing
AGE_BYTES = 4  # int32 arrival index
SMALL = 4096  # sums that one call smooths as fast


class Attention(Rule):
    """Rank by attention received: sum over query rows of `n^alpha * p / count^beta`.

    `(alpha, beta)` is (0, 0) for H2O, (0, 1) for mean attention, (1, 1) for XMU's correction.

    Attributes:
        alpha: power of the number of keys the query sees; 1 undoes the softmax's dilution.
        beta: power of the number of rows that could attend to the key; 1 undoes its age.
        horizon: rows that count; None is all of them.
        kind: `window` counts exactly the last `horizon` rows before each compaction, `decay`
            weighs them by `(1 - 1/horizon)` per row.
        literal: divide by the key's whole age although only `horizon` rows were counted.
        share: `head` lets every KV head choose its slots, `layer` makes them vote together.
        pool: odd width of smoothing over neighbouring slots (SnapKV); 1 is off.
        pool_kind: `avg` or `max` smoothing.
    """

    name: str = "attention"
    alpha: float = Field(default=0.0, ge=0.0, le=2.0)
    beta: float = Field(default=0.0, ge=0.0, le=2.0)
    horizon: int | None = Field(default=None, ge=1, le=1 << 31)
    kind: Literal["window", "decay"] = "window"
    literal: bool = False
    pool: int = Field(default=1, ge=1, le=65535)
    pool_kind: Literal["avg", "max"] = "avg"

    needs: ClassVar[frozenset[Need]] = frozenset({"attention"})
    paper: ClassVar[str] = "H2O arXiv:2306.14048, SnapKV arXiv:2404.14469, XMU"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "h2o": {},
        "mean": dict(beta=1),
        "xmu": dict(alpha=1, beta=1),
        "xmu-forget": dict(alpha=1, beta=1, horizon=512, kind="decay"),
        "forget": dict(horizon=512, kind="decay"),
        "tova": dict(horizon=1, share="layer"),
        "snapkv": dict(horizon=32, pool=5),
    }
    axes: ClassVar[Mapping[str, str]] = {
        **Rule.axes,
        "alpha": "row power",
        "beta": "age power",
        "horizon": "forgets",
        "kind": "decays",
        "literal": "literal",
        "pool": "pooled",
        "pool_kind": "max-pooled",
    }
    feature_names: ClassVar[tuple[str, ...]] = (
        "row power", "age power", "forgets", "decays", "layer-shared", "pooled",
    )  # fmt: skip
    fast: ClassVar[frozenset[str]] = frozenset({"scan"})

    @model_validator(mode="after")
    def _odd_pool(self) -> "Attention":
        if self.pool % 2 == 0:
            raise ValueError(f"pool must be odd, got {self.pool}")
        return self

    @property
    def ages(self) -> bool:
        """Whether each slot holds the arrival index of its token."""
        return self.beta != 0

    def blocks(self, interval: int) -> int:
        """Partial sums held per slot: more than 1 when a window spans several intervals."""
        if self.kind == "decay" or self.horizon is None:
            return 1
        return max(1, self.horizon // interval)

    def slot_bytes(self, interval: int) -> int:
        """The partial sums, and the age where it plays a role."""
        return SUM_BYTES * self.blocks(interval) + (AGE_BYTES if self.ages else 0)

    def check(self, interval: int, trigger: str) -> None:
        """A window over several intervals needs whole intervals, and a stream from token 0."""
        if self.kind != "window" or self.horizon is None or self.horizon <= interval:
            return
        if self.horizon % interval:
            raise ValueError(
                f"rule.horizon {self.horizon} must be at most interval {interval} "
                "or a multiple of it"
            )
        if trigger != "stream":
            raise ValueError("rule.horizon must be at most interval when a prompt triggers")

    def fitted(self, interval: int) -> "Attention":
        """A window that fits the interval: at most it, or a multiple of it.

        One row is the same window whatever its weight, and no slot is older than it.
        """
        if self.horizon is None:
            return self
        if self.horizon == 1:
            same = {"alpha": 0.0, "kind": "window"} | ({} if self.literal else {"beta": 0.0})
            return self.model_copy(update=same)
        if self.kind == "decay" or self.horizon <= interval or self.horizon % interval == 0:
            return self
        return self.model_copy(update={"horizon": interval * max(1, self.horizon // interval)})

    def canonical(self) -> dict[str, Any]:
        """Without fields that others make inactive; `name` is implied by the key."""
        d = self.model_dump(exclude={"name"})
        if d["horizon"] is None or d["beta"] == 0:
            d["literal"] = False
        if d["horizon"] is None:
            d["kind"] = "window"
        if d["pool"] == 1:
            d["pool_kind"] = "avg"
        return d

    def features(self) -> dict[str, float]:
        """Powers as they are, horizon and pool on a log scale."""
        return {
            **super().features(),
            "row power": self.alpha,
            "age power": self.beta,
            "forgets": 1 - log2(self.horizon) / 12 if self.horizon else 0,
            "decays": self.kind == "decay",
            "literal": self.literal and self.beta != 0,
            "pooled": log2(self.pool) / 4,
            "max-pooled": self.pool > 1 and self.pool_kind == "max",
        }

    def family(self) -> str:
        """By the powers, or by the window of one row."""
        if self.horizon == 1:
            return "TOVA-like"
        known: dict[tuple[float, float], str] = {
            (0, 0): "H2O-like",
            (0, 1): "Mean-attention",
            (1, 1): "XMU-like",
        }
        return known.get((self.alpha, self.beta), "Attention-scored")

    def words(self) -> list[str]:
        """Horizon, pooling and voting, where they are used."""
        parts = []
        if self.horizon is not None and self.horizon > 1:
            over = "over the last" if self.kind == "window" else "decaying over"
            parts.append(f"{over} {self.horizon} queries")
        if self.pool > 1:
            parts.append(f"{self.pool_kind} pool {self.pool}")
        if self.share == "layer":
            parts.append("heads vote together")
        return parts

    def scorer(self, place: Place) -> "AttentionScorer":
        """Running sums per slot."""
        return AttentionScorer(self, place)

    def divided(self, age: "Tensor") -> "Tensor":
        """By what sums of slots of an `age` are divided, fp32."""
        counts = self._counts(age.float())
        return counts if self.beta == 1 else counts**self.beta

    def _counts(self, age: "Tensor") -> "Tensor":
        """Rows that could vote for slots of an age, weighted as the sums are."""
        import torch

        if self.horizon is None or self.literal:
            return age
        if self.kind == "decay":
            keep = 1 - 1 / self.horizon
            return torch.rsub(keep**age, self.horizon, alpha=self.horizon)  # sum of keep^i, i < age
        return age.clamp_max(self.horizon)


class AttentionScorer(Scorer):
    """Running sums per slot.

    Attributes:
        running: sums and births.
    """

    running: RunningSums

    def __init__(self, rule: Attention, place: Place) -> None:
        import torch

        self.rule, self.blocks = rule, rule.blocks(place.interval)
        shape, device = (place.batch, rule.voters(place.kv_heads), 0), place.device
        fp32 = torch.float32  # whatever the default type is: ranks are compared bit by bit
        plain = type(self).ranks is AttentionScorer.ranks and rule.ages and rule.pool == 1
        decays = rule.kind == "decay" and rule.horizon is not None
        self.running = RunningSums(
            torch.zeros(self.blocks, *shape, device=device, dtype=fp32),
            torch.zeros(shape, dtype=torch.int32, device=device) if rule.ages else None,
            alpha=rule.alpha,
            horizon=rule.horizon if rule.kind == "window" else None,
            decay=1 - 1 / rule.horizon if decays and rule.horizon else 1.0,
            # one launch less on a GPU; a CPU divides as fast
            divisors=partial(divisors, rule, device) if plain and device.type != "cpu" else None,
        )

    @property
    def sums(self) -> "Tensor":
        """Partial sums of what slots received `[R, B, V, N]` fp32, `V` KV heads or 1."""
        return self.running.sums

    @property
    def born(self) -> "Tensor | None":
        """Arrival index of each slot's token `[B, V, N]` int32; None if age plays no role."""
        return self.running.born

    @property
    def forgets(self) -> bool:
        """Whether only the last rows before a compaction count, so that partial sums leave."""
        return self.rule.kind == "window" and self.rule.horizon is not None

    def row_weights(self, visible: "Tensor", left: "Tensor") -> "Tensor":
        """`visible^alpha`, weighed by the window or the decay."""
        import torch

        r = self.rule
        w = visible.float() if r.alpha == 1 else visible.float() ** r.alpha
        if r.horizon is None or (r.kind == "decay" and len(w) == 1):
            return w
        if r.kind == "decay":
            back = torch.arange(len(w) - 1, -1, -1, device=w.device, dtype=torch.float32)
            return w * (1 - 1 / r.horizon) ** back
        return w * (left < r.horizon)

    def observe(self, segment: Segment) -> None:
        """Add what every slot received."""
        assert segment.received is not None
        self.add(segment.received, segment.seen, segment.count)

    def add(self, received: "Tensor", seen: int, m: int) -> None:
        """Add `received` `[B, H, N]` of a segment whose `m` new tokens follow `seen` older ones.

        It may be kept, and written to.
        """
        import torch

        sums, born = self.sums, self.born
        if sums.shape[2] == 1:
            received = received.mean(1, keepdim=True)
        old = sums.shape[-1]
        if old and self.running.decay != 1:
            sums = sums * self.running.decay**m
        if self.blocks == 1 and received.dtype == sums.dtype:
            if old:
                received[..., :old].add_(sums[0])
            sums = received[None]
        else:
            sums = torch.constant_pad_nd(sums, (0, received.shape[-1] - old))
            sums[0].add_(received)
        if born is not None:
            new = torch.arange(seen, seen + m, dtype=torch.int32, device=born.device)
            born = torch.cat([born, new.expand(*born.shape[:-1], m)], -1)
        self.running.hold(sums, born)

    def ranks(self, slots: Slots) -> "Tensor":
        """Corrected sums, smoothed outside the recent window."""
        return self.smooth(self.corrected(slots.seen), slots.recent_from)

    def corrected(self, seen: int) -> "Tensor":
        """Sums `[B, V, N]` over what slots could have received after `seen` tokens."""
        beta = self.rule.beta
        total = self.sums.sum(0) if self.blocks > 1 else self.sums[0]
        if beta == 0:
            return total
        assert self.born is not None
        return total / self.rule.divided(seen - self.born)

    def smooth(self, total: "Tensor", recent_from: int) -> "Tensor":
        """Mix the sums of neighbours before `recent_from`; slots must be in order of time."""
        import torch

        r = self.rule
        if r.pool == 1 or recent_from <= 0:
            return total
        old = total[..., :recent_from]
        if r.pool_kind == "avg" and total.device.type == "cpu" and old.numel() > SMALL:
            head = _mean_of_near(old, r.pool)
        else:
            pool = getattr(torch.nn.functional, f"{r.pool_kind}_pool1d")
            head = pool(old, r.pool, stride=1, padding=r.pool // 2)
        return torch.cat([head, total[..., recent_from:]], -1)

    def drop(self, index: "Tensor") -> None:
        """Drop all slots but `index`."""
        from kvsearch.rules.base import pick

        sums = pick(self.sums, index if index.dim() == 1 else index[None])
        self.running.hold(sums, None if self.born is None else pick(self.born, index))

    def keep(self, index: "Tensor | None") -> None:
        """Drop all slots but `index`, and age the partial sums by one compaction."""
        import torch

        if index is not None:
            self.drop(index)
        if self.forgets:
            sums = torch.roll(self.sums, 1, 0)  # the oldest partial sum leaves the window
            sums[0] = 0
            self.running.hold(sums, self.born)

    @property
    def nbytes(self) -> int:
        """Sums and ages."""
        batch = max(1, self.sums.shape[1])
        return (self.sums.nbytes + (0 if self.born is None else self.born.nbytes)) // batch

    def reorder(self, rows: "Tensor") -> None:
        """Select batch rows (beam search)."""
        self.running.reorder(rows)


def require_scannable(rule: Rule, scorer: Scorer) -> None:
    """Raise a `PolicyError` if a rule names `scan` in `fast` and its scorer has no such sums."""
    if "scan" not in rule.fast:
        return
    what = "is none"
    if isinstance(rule, Attention) and isinstance(scorer, AttentionScorer):
        own = ("observe", "ranks", "keep")
        mine = [x for x in own if getattr(type(scorer), x) is not getattr(AttentionScorer, x)]
        if not mine:
            return
        what = f"has {mine[0]}() of its own"
    raise PolicyError(
        f"rule {rule.name!r} names 'scan' in `fast`, which replays the sums of an AttentionScorer, "
        f"and {type(scorer).__name__} {what}: set fast = frozenset(), or derive rule and scorer "
        "from Attention and AttentionScorer"
    )


_tables: dict[tuple[object, ...], "Tensor"] = {}


def divisors(rule: Attention, device: "torch.device", seen: int) -> "Tensor":
    """`rule.divided` of all ages up to `seen` at least, `[A]` fp32, kept for all layers."""
    import torch

    key = rule, device, torch.is_inference_mode_enabled()
    if key not in _tables or len(_tables[key]) <= seen:
        if len(_tables) > 64:
            _tables.clear()
        size = max(1024, 1 << seen.bit_length())
        _tables[key] = rule.divided(torch.arange(size, dtype=torch.int32, device=device))
    return _tables[key]


def _mean_of_near(total: "Tensor", width: int) -> "Tensor":
    """What `avg_pool1d` gives to the last bit, on a CPU in a sixth of its time."""
    import torch

    near = torch.nn.functional.pad(total, (width // 2, width // 2))
    count = total.shape[-1]
    found = near[..., :count].clone()
    for i in range(1, width):
        found += near[..., i : i + count]
    return found / width
