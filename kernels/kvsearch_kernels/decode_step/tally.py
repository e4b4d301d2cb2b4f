"""Adding what slots received from one token to a rule's sums: the last part of a step."""

from torch import Tensor


def tally(
    sums: Tensor,
    received: Tensor,
    order: Tensor | None,
    lengths: Tensor,
    *,
    held: int,
    end: int = 0,
    alpha: float = 0.0,
    horizon: int | None = None,
    keep: float = 1.0,
) -> Tensor:
    """Add what slots received from one token to `sums`, in place.

    The token's weight is `n^alpha` with `n = held + lengths`, the slots that it sees; with a
    horizon it is 0 for tokens that as many others, or more, follow before the length is `end`. The
    length is read on the device, so that no argument of a launch changes from token to token.

    Args:
        sums: `[B, V, N]` fp32 in order of time, as a view of memory whose last axis is contiguous;
            `V` is the KV heads, or 1, and then they are averaged.
        received: `[B, H, N]` of the slots, one part after the other.
        order: where there the slots in order of time are, `[N]` or `[B or 1, V or 1, N]`; None if
            they are in that order.
        lengths: slots in use of the last part `[B, H]` int32, alike in all heads.
        held: slots of the other parts.
        end: length of the last part at the next compaction; read with a horizon alone.
        alpha: power of the number of slots seen.
        horizon: last tokens before a compaction that count; None is all.
        keep: factor on the sums before (a decay).

    Returns:
        `sums`.
    """
    if keep != 1.0:
        sums.mul_(keep)
    if order is not None:
        received = _picked(received, order)
    weight = weight_of(lengths, held, end, alpha, horizon)
    if weight is not None:
        received = received * weight
    if sums.shape[1] == 1:
        received = received.mean(1, keepdim=True)
    return sums.add_(received)


def _picked(received: Tensor, order: Tensor) -> Tensor:
    if order.dim() == 1:
        return received.index_select(-1, order)
    return received.gather(-1, order.expand(received.shape))


def weight_of(
    lengths: Tensor, held: int, end: int, alpha: float, horizon: int | None
) -> Tensor | None:
    """The token's weight `[1]` fp32, or None if it is 1 always."""
    if alpha == 0 and horizon is None:
        return None
    used = lengths.flatten()[:1]
    visible = (used + held).float()
    weight = visible if alpha == 1 else visible**alpha
    return weight if horizon is None else weight * (end - used < horizon)
