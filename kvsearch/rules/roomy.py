"""Sums of slots with room for those to come, so that between two compactions nothing moves."""

from typing import TYPE_CHECKING

from kvsearch.rules.base import Scorer

if TYPE_CHECKING:
    from torch import Tensor

    from kvsearch_kernels.copy_rows import Copy


class RoomySums(Scorer):
    """Partial sums and births of slots.

    Args:
        sums: `[R, B, V, N]`.
        born: arrival index of each slot's token `[B, V, N]` int32, or None.
    """

    def __init__(self, sums: "Tensor", born: "Tensor | None") -> None:
        self._sums, self._born = sums, born
        self._count: int | None = None  # slots of the room, if more are in use than were shown
        self._room: tuple[Tensor, Tensor | None] | None = None  # sums and births, and more slots
        self._shown: Tensor | None = None  # the sums that are the front of the room

    @property
    def sums(self) -> "Tensor":
        """Partial sums of what slots received `[R, B, V, N]` fp32, `V` KV heads or 1."""
        self._show()
        return self._sums

    @sums.setter
    def sums(self, sums: "Tensor") -> None:
        self._show()
        self._sums = sums

    @property
    def born(self) -> "Tensor | None":
        """Arrival index of each slot's token `[B, V, N]` int32; None if age plays no role."""
        self._show()
        return self._born

    @born.setter
    def born(self, born: "Tensor | None") -> None:
        self._show()
        self._born = born

    def reserve(self, seen: int, slots: int) -> None:
        """Have room for `slots`, of which the next will be born at `seen`."""
        import torch

        n, born = self.sums.shape[-1], self.born
        fits = (*self.sums.shape[:-1], slots)
        if self._room is not None and self._room[0].shape == fits:
            if self.sums is self._shown:
                return  # nothing came since but tokens, whose births were written then
            self._room[0][..., :n] = self.sums
            self._room[0][..., n:] = 0
        else:
            wide = None if born is None else born.new_empty((*born.shape[:-1], slots))
            self._room = torch.constant_pad_nd(self.sums, (0, slots - n)), wide
        wide = self._room[1]
        if wide is not None and born is not None:
            wide[..., :n] = born
            wide[..., n:] = torch.arange(
                seen, seen + slots - n, dtype=torch.int32, device=wide.device
            )
        self.counted(n)

    def moved(
        self, sums: "Tensor", born: "Tensor | None", count: int, copies: "list[Copy] | None"
    ) -> None:
        """Hold these sums `[B, V, C]` and births, where others were held if there is room."""
        from kvsearch_kernels.copy_rows import Copy

        self._count = None
        room = self._room
        if copies is None or room is None or room[0].shape[1:] != sums.shape:
            self._room = sums[None], born
        else:
            copies.append(Copy(room[0][0], sums))
            if room[1] is not None and born is not None:
                copies.append(Copy(room[1], born))
        self.counted(count)

    def counted(self, count: int) -> None:
        """Let the first `count` slots of the room be those that there are."""
        self._count = count

    def _show(self) -> None:
        """Views of the room with the slots that came: not made at each token, which costs."""
        if self._count is None or self._room is None:
            return
        (sums, born), count, self._count = self._room, self._count, None
        self._sums = self._shown = sums[..., :count]
        self._born = None if born is None else born[..., :count]
