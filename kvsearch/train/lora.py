"""What of a model is trained, and how low-rank additions go back into its weights."""

from typing import Any

import torch

from kvsearch.models.read import muted
from kvsearch.train.recipe import Recipe


def opened(model: Any, recipe: Recipe, new: int | None) -> Any:
    """The model, or a wrapper of it, with gradients for what is trained.

    Args:
        model: in fp32; low-rank additions are put into it.
        recipe: says whether, and of which rank. All linear layers but the output have additions.
        new: a token whose embedding is trained in any case.
    """
    if recipe.lora is None:
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=recipe.lora,
        lora_alpha=2 * recipe.lora,
        lora_dropout=0.0,
        target_modules="all-linear",
        trainable_token_indices=None if new is None else [new],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(recipe.seed)
    with muted():
        return get_peft_model(model, config)


def closed(model: Any, recipe: Recipe) -> Any:
    """The plain model without gradients, additions merged into its weights."""
    with muted():
        plain = model if recipe.lora is None else model.merge_and_unload()
    return plain.eval().requires_grad_(False)


def trained_numbers(model: Any) -> int:
    """Numbers that have gradients; tied ones count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
