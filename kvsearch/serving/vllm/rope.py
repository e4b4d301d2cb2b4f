"""The angles by which a model in vLLM turns its keys: needed to re-index them, or to read queries.

vLLM keeps one rotary embedding for all layers that turn alike. What is taken from it is compared
with the table of cosines and sines that it turns by.
"""

import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from kvsearch.errors import ModelError


def frequencies(layers: int, what: str, instead: str) -> list[Tensor]:
    """Angle per position of each channel pair `[R / 2]`, for every layer.

    Args:
        layers: of the model.
        what: what needs them.
        instead: what to do without them.

    Raises:
        ModelError: layers turn in different ways, or not half against half by position alone.
    """
    found = list({id(rope): rope for rope in _ROPE_DICT.values()}.values())
    if len(found) == 1 and getattr(found[0], "is_neox_style", False):
        rope = found[0]
        try:
            inv_freq: Tensor = rope._compute_inv_freq(rope.base).float().cpu()
            table: Tensor = rope.cos_sin_cache.float().cpu()
        except (AttributeError, TypeError):
            pass  # it computes its angles in another way
        else:
            at = torch.tensor([0, 1, 29, table.shape[0] - 1], device="cpu")
            angle = at.unsqueeze(-1) * inv_freq
            want = torch.cat([angle.cos(), angle.sin()], -1)
            if want.shape[-1] == table.shape[-1] and torch.allclose(table[at], want, atol=0.01):
                return [inv_freq] * layers
    raise ModelError(
        f"{what} needs one rotary embedding that turns channel c with channel c + D/2 by position "
        f"alone, and this model has another in vLLM; {instead}"
    )
