"""A model over whole texts under a policy, with gradients.

What a query sees is what it sees in the evaluator, because the attention is the evaluator's own
pass: lives of keys from the policy's schedule (`cache.by_age.plans`). Nothing is kept after the
text, and roundings let gradients pass.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvsearch.cache.by_age import plans
from kvsearch.cache.huggingface import PolicyCache
from kvsearch.errors import PolicyError
from kvsearch.evaluation.anchored_tokens import feed
from kvsearch.models.head import LOW
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy, check

IGNORED = -100  # the label of a token that is not to be predicted


def require_schedule(policy: Policy) -> None:
    """Raise a `PolicyError` if what a query sees is not known before the model runs."""
    if plans.applies(policy):
        return
    if policy.scored:
        assert policy.active_rule is not None
        why = f"its rule {policy.active_rule.name!r} ranks slots while the model runs"
        instead = "take one that evicts by age"
    elif policy.ranks_tiers:
        why = "a slot's tier depends on its rank"
        instead = "take one with a single tier"
    else:
        why = "anchors with positions 'cache' move every sequence anew"
        instead = "use positions 'original'"
    if policy.channels.active:
        instead += ", or train what its channels leave, under full attention, with --channels-only"
    raise PolicyError(f"cannot train under policy {policy.name or 'policy'}: {why}; {instead}")


class Scheduled:
    """Examples of a text, and a model's loss on them under a policy.

    Args:
        policy: by age, see `require_schedule`; without channels.
        loaded: the model, and the tokenizer that knows all tokens that the policy inserts.
        prompt: tokens of a window that arrive in one call, and are not to be predicted.
        native: 16-bit storage type; None is that of `PolicyCache`.
    """

    def __init__(
        self, policy: Policy, loaded: LoadedModel, *, prompt: int = 0, native: Any = None
    ) -> None:
        require_schedule(policy)
        check(policy, loaded.shape, prompt=prompt)
        self.policy, self.loaded, self.prompt, self.native = policy, loaded, prompt, native
        self.silent = loaded.silent

    def examples(self, windows: NDArray[np.int64]) -> list[dict[str, Tensor]]:
        """What the model is fed of windows `[W, T]`: `input_ids`, `labels` and `prompt` of each.

        Labels are those of the windows' own tokens; inserted ones and the first have none.
        """
        found = []
        for window in windows:
            fed = feed(self.loaded, self.policy, window)
            labels = np.full(len(fed.ids), IGNORED)
            first = max(1, self.prompt)
            labels[fed.places[first:]] = window[first:]
            if self.silent is not None:
                labels[labels == self.silent] = IGNORED
            prompt = fed.until(self.prompt)
            found.append(
                {k: torch.as_tensor(v) for k, v in
                 dict(input_ids=fed.ids, labels=labels, prompt=prompt).items()}
            )  # fmt: skip
        return found

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """NLL summed over the labels of a batch of examples `[B, N]`, in nats.

        Args:
            model: that of `loaded`, or a wrapper of it.
            batch: examples of equal length; of a policy with anchors only one.
        """
        cache = PolicyCache(
            self.policy, self.loaded.model, packed=False, native=self.native,
            tokenizer=self.loaded.tokenizer,
        )  # fmt: skip
        for layer in cache.held:
            layer.whole = int(batch["prompt"][0])
        ids, labels = batch["input_ids"], batch["labels"]
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, :-1]
        if self.silent is not None:
            logits = logits.index_fill(-1, torch.tensor(self.silent, device=logits.device), LOW)
        return cross_entropy(
            logits.flatten(0, 1).float(),
            labels[:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
