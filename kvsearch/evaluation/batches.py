"""How many windows share a forward pass: so many as asked for, or as many as a GPU has room for.

On a GPU a policy that compacts often costs its launches, which are the same for one window and for
eight. On a CPU windows one by one are as fast, and take less memory.
"""

import torch

from kvsearch.models.load import LoadedModel
from kvsearch.models.memory import free_memory
from kvsearch.models.shape import text_config

SHARE = 0.7  # of the free memory that a pass may take
MOST = 16  # windows; with more there is nothing left to hide
MAP, SLICE = 512, 128  # rows of an attention map, and of logits, that are there at once


class Batches:
    """Windows of one model's forward passes.

    Args:
        loaded: the model.
        asked: windows of every pass; None leaves it to the memory.
    """

    def __init__(self, loaded: LoadedModel, asked: int | None = None) -> None:
        self.loaded, self.asked = loaded, asked
        self._most = MOST

    def size(self, left: int, tokens: int) -> int:
        """Windows of the next pass, of `left` that there are, of `tokens` each."""
        if self.asked is not None:
            return min(self.asked, left)
        free = self._free()
        if free is None:
            return 1
        return max(1, min(left, self._most, int(SHARE * free) // self.window_bytes(tokens)))

    def fewer(self, than: int) -> bool:
        """Note that a pass of so many windows found no room; whether smaller ones can be tried."""
        if self.asked is not None or than == 1:
            return False
        self._most = min(self._most, than // 2)
        return True

    def window_bytes(self, tokens: int) -> int:
        """What a window takes at most, about: all keys and values, and one layer's activations."""
        loaded, cfg = self.loaded, text_config(self.loaded.model.config)
        size = loaded.model.dtype.itemsize
        inner = getattr(cfg, "intermediate_size", None) or 4 * cfg.hidden_size
        held = loaded.shape.layers * loaded.shape.slot_bytes * size // 2
        layer = size * (8 * cfg.hidden_size + 4 * inner)
        wide = 2 * 4 * (loaded.shape.heads * min(MAP, tokens) + cfg.vocab_size * SLICE // tokens)
        return int(tokens * (held + layer + wide))

    def _free(self) -> int | None:
        """Bytes free on the model's GPU, with what torch keeps for later; None elsewhere."""
        device = torch.device(self.loaded.device)
        free = free_memory(device) if device.type == "cuda" else None
        if free is None:
            return None
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
