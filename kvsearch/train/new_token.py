"""The token of inserted anchors as a part of a checkpoint: in its tokenizer and its embeddings."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from transformers import AddedToken

from kvsearch.models.load import LoadedModel
from kvsearch.models.read import quiet
from kvsearch.policy import Policy
from kvsearch.policy.anchors import NEW
from kvsearch.workloads.text.endings import full_stop


def with_new_token(loaded: LoadedModel, policy: Policy) -> LoadedModel:
    """The model with the token that `policy` inserts, where it inserts one and has none yet.

    Its embedding is that of an untrained policy: a copy of that of ".", or the mean of all. The
    model never predicts it: `generate` suppresses it, and losses leave out its logit.

    Args:
        loaded: whose model is changed; its tokenizer is not.
        policy: says whether, and with which embedding.
    """
    anchors, known = policy.anchors, loaded.silent
    if anchors is None or not anchors.insert or known is not None:
        return loaded
    model, tokenizer = loaded.model, deepcopy(loaded.tokenizer)
    tokenizer.add_tokens([AddedToken(NEW, special=True, normalized=False)], special_tokens=True)
    token = int(tokenizer.convert_tokens_to_ids(NEW))
    rows = model.get_input_embeddings().weight
    new = rows[full_stop(tokenizer)].detach().clone()
    if anchors.embedding == "mean":
        new = rows.detach().double().mean(0).to(rows.dtype)
    with quiet():
        if token >= len(rows):
            model.resize_token_embeddings(token + 1, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = new
    _suppress(model.generation_config, token)
    return replace(loaded, model=model, tokenizer=tokenizer)


def _suppress(config: Any, token: int) -> None:
    before = list(config.suppress_tokens or ())
    config.suppress_tokens = sorted({*before, token})
