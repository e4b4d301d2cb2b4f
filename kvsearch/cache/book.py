"""The score book of one layer: attention received so far by every slot (arXiv: XMU, H2O, TOVA).

Sums are kept residual; age and window corrections are applied when ranking, so that they can change
without touching the sums.
"""

import torch
from torch import Tensor

from kvsearch.cache.store import gather_flat
from kvsearch.policy import LayerLayout, Score


class ScoreBook:
    """Running sums per slot.

    Attributes:
        sums: `[R, B, V, N]` fp32; `V` is KV heads or 1, `R` the number of partial sums.
        born: arrival index of each slot's token `[B, V, N]` int32, or None where age plays no role.
    """

    def __init__(self, layer: LayerLayout, batch: int, device: torch.device) -> None:
        p = layer.policy
        assert p.score is not None
        self.layer = layer
        self.score: Score = p.score
        self.blocks = p.score_blocks
        voters = 1 if p.score.share == "layer" else layer.shape.kv_heads
        self.sums = torch.zeros(self.blocks, batch, voters, 0, device=device)
        self.born: Tensor | None = None
        if p.needs_age:
            self.born = torch.zeros(batch, voters, 0, dtype=torch.int32, device=device)

    @property
    def forgets(self) -> bool:
        """Whether only the last rows before a compaction count, so that partial sums leave."""
        return self.score.kind == "window" and self.score.horizon is not None

    def row_weights(self, visible: Tensor, left: Tensor) -> Tensor:
        """Factor of each query row in the sums.

        Args:
            visible: keys each row sees, itself included, `[M]`.
            left: rows after each row and before the next compaction, `[M]`.
        """
        s = self.score
        w = visible.float() ** s.alpha
        if s.horizon is None:
            return w
        if s.kind == "decay":
            return w * (1 - 1 / s.horizon) ** torch.arange(
                len(w) - 1, -1, -1, device=w.device, dtype=torch.float32
            )
        return w * (left < s.horizon)

    def add(self, received: Tensor, seen: int, m: int) -> None:
        """Add `received` `[B, H, N]` of a segment whose `m` new tokens follow `seen` older ones."""
        if self.sums.shape[2] == 1:
            received = received.mean(1, keepdim=True)
        old = self.sums.shape[-1]
        if self.score.kind == "decay" and self.score.horizon is not None:
            self.sums *= (1 - 1 / self.score.horizon) ** m
        self.sums = torch.nn.functional.pad(self.sums, (0, received.shape[-1] - old))
        self.sums[0] += received
        if self.born is not None:
            new = torch.arange(seen, seen + m, dtype=torch.int32, device=self.born.device)
            self.born = torch.cat([self.born, new.expand(*self.born.shape[:-1], m)], -1)

    def ranks(self, seen: int, protected_end: int) -> Tensor:
        """Scores `[B, V, N]`, higher is better, after `seen` tokens.

        Args:
            seen: tokens of the stream so far.
            protected_end: slots from here on are recent_window; smoothing does not mix them in.
        """
        return self.smooth(self.corrected(seen), protected_end)

    def corrected(self, seen: int) -> Tensor:
        """Scores `[B, V, N]` before smoothing, slot by slot."""
        beta = self.score.beta
        total = self.sums.sum(0) if self.blocks > 1 else self.sums[0]
        if beta == 0:
            return total
        counts = self._counts(seen)
        return total / (counts if beta == 1 else counts**beta)

    def smooth(self, total: Tensor, protected_end: int) -> Tensor:
        """Mix the scores of neighbours; slots must be in order of time."""
        s = self.score
        if s.pool == 1 or protected_end <= 0:
            return total
        pool = (
            torch.nn.functional.avg_pool1d
            if s.pool_kind == "avg"
            else torch.nn.functional.max_pool1d
        )
        head = pool(total[..., :protected_end], s.pool, stride=1, padding=s.pool // 2)
        return torch.cat([head, total[..., protected_end:]], -1)

    def _counts(self, seen: int) -> Tensor:
        """Rows that could vote for each slot, weighted as the sums are."""
        assert self.born is not None
        s = self.score
        age = float(seen) - self.born  # fp32
        if s.horizon is None or s.literal:
            return age
        if s.kind == "decay":
            keep = 1 - 1 / s.horizon
            return torch.rsub(keep**age, s.horizon, alpha=s.horizon)  # sum of keep^i, i < age
        return age.clamp_max(s.horizon)

    def keep(self, index: Tensor | None) -> None:
        """Drop all slots but `index`, and age the partial sums by one compaction."""
        if index is not None:
            self.sums = gather_flat(self.sums, index if index.dim() == 1 else index[None])
            if self.born is not None:
                self.born = gather_flat(self.born, index)
        if self.forgets:
            self.sums = torch.roll(self.sums, 1, 0)  # the oldest partial sum leaves the window
            self.sums[0] = 0

    @property
    def nbytes(self) -> int:
        """Bytes per sequence."""
        batch = max(1, self.sums.shape[1])
        return (self.sums.nbytes + (0 if self.born is None else self.born.nbytes)) // batch

    def reorder(self, rows: Tensor) -> None:
        """Select batch rows (beam search)."""
        self.sums = self.sums[:, rows]
        self.born = None if self.born is None else self.born[rows]
