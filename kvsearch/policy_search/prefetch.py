"""Prefetched windows: measured before those in front of them.

Several evaluators may measure several windows of one policy at once, and a later one may end
first. The record of a policy holds its first windows without a gap, so such a window waits in a
file of its own until those in front of it are there. A kill does not lose it.
"""

from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement


class PrefetchedWindows:
    """The windows of a run that wait.

    Args:
        folder: where they are kept.
        part: of the text.
    """

    def __init__(self, folder: RunFolder, part: str) -> None:
        self.folder, self.part = folder, part
        self._waiting: dict[str, dict[int, Measurement]] = {}  # by fingerprint and first window
        self._saved: set[tuple[str, int]] = set()  # those of them that have a file

    def restore(self) -> None:
        """Bring back those that an earlier process left."""
        for first, key in self.folder.pieces(self.part):
            self.add(key, first, self.folder.load_nll(self._name(first), key))
            self._saved.add((key, first))

    @property
    def fingerprints(self) -> list[str]:
        """Policies that have some."""
        return list(self._waiting)

    def firsts(self, fingerprint: str) -> set[int]:
        """First windows of those of a policy."""
        return set(self._waiting.get(fingerprint, ()))

    def add(self, fingerprint: str, first: int, piece: Measurement) -> None:
        """One that was just measured; `save` is called if it has to wait."""
        self._waiting.setdefault(fingerprint, {})[first] = piece

    def following(self, fingerprint: str, windows: int, most: int) -> list[Measurement]:
        """Those that continue a record of so many windows, to `most` windows at most."""
        waiting, found = self._waiting.get(fingerprint, {}), []
        while (piece := waiting.get(windows)) is not None and windows + len(piece.nll) <= most:
            found.append(piece)
            windows += len(piece.nll)
        return found

    def save(self, fingerprint: str) -> None:
        """Write those of a policy that have no file."""
        for first, piece in self._waiting.get(fingerprint, {}).items():
            if (fingerprint, first) not in self._saved:
                self.folder.save_nll(self._name(first), fingerprint, piece)
                self._saved.add((fingerprint, first))

    def drop(self, fingerprint: str, before: int | None = None) -> None:
        """Forget those of a policy, or those that begin before a window."""
        waiting = self._waiting.get(fingerprint, {})
        for first in [f for f in waiting if before is None or f < before]:
            del waiting[first]
            if (fingerprint, first) in self._saved:
                self._saved.remove((fingerprint, first))
                self.folder.drop_nll(self._name(first), fingerprint)
        if not waiting:
            self._waiting.pop(fingerprint, None)

    def clear(self) -> None:
        """Forget all: what a killed run had measured ahead and this one did not need."""
        for key in self.fingerprints:
            self.drop(key)

    def _name(self, first: int) -> str:
        return f"{self.part}.{first}"
