"""The model's own logits, taken in slices, so that long windows need no `T x vocabulary` tensor."""

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvsearch.errors import ModelError, lacks_memory
from kvsearch.models.read import brief
from kvsearch.models.shape import body, entrance

ROWS = 128  # tokens whose logits are held at once; glibc keeps freed memory of up to 32 MB
LOW = -1e30  # logit of a token that is never predicted; finite, for differences of logits


def _eagerly() -> AbstractContextManager[Any]:
    """Runs what `torch.compile` has made as it was: every call has another length here."""
    if "torch._dynamo" not in sys.modules:  # and importing it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


NOT_FINITE = (
    "the model's logits are not finite: its weights are damaged, or too large for this dtype "
    "(--dtype float32 holds the most)"
)


def _states(cache: Any) -> list[Tensor]:
    """What linear attention holds in a cache."""
    held = (x for layer in cache.layers for x in getattr(layer, "recurrent_states", {}).values())
    return [x for x in held if x is not None]


class Head:
    """Body and output layer of a causal language model.

    Args:
        model: of transformers.
        silent: a token that is never predicted, which has no logit and no loss: probabilities are
            those of the others.

    Attributes:
        vocabulary: tokens that have a logit.

    Raises:
        ModelError: the model has no logits, or computes them in a way that slices would not repeat.
    """

    def __init__(self, model: Any, silent: int | None = None) -> None:
        self.silent: int | None = None
        self.model, self.body, self.out = model, body(model), model.get_output_embeddings()
        if self.out is None or self.body is model:
            raise ModelError(
                f"{type(model).__name__} has no body and output layer apart from each other; load "
                "a causal language model with AutoModelForCausalLM"
            )
        cfg = model.config.get_text_config(decoder=True)
        self._rope = getattr(cfg, "rope_parameters", None)
        self.cap = getattr(cfg, "final_logit_softcapping", None)
        self.factor = float(getattr(cfg, "logit_scale", None) or 1.0)
        self.factor /= float(getattr(cfg, "logits_scaling", None) or 1.0)
        self.vocabulary: int = self._verify()
        if silent is not None and silent < self.vocabulary:  # without a logit it is never predicted
            self.silent = silent

    def _verify(self) -> int:
        """The slices must equal the model's own logits; a family with another head is refused."""
        name, device = type(self.model).__name__, entrance(self.model)
        ids = torch.arange(4, device=device)[None]
        try:
            with torch.inference_mode(), _eagerly():
                hidden = self.body(ids, use_cache=False).last_hidden_state
                mine = self.logits(hidden)
                theirs = self.model(ids, use_cache=False).logits.float()
        except Exception as error:  # whatever the code of a model raises
            if lacks_memory(error):
                raise
            raise ModelError(
                f"{name} cannot be evaluated ({brief(error)}); kvsearch evaluates causal language "
                "models whose base_model returns hidden states of token ids"
            ) from error
        if not (theirs < float("inf")).all():  # minus infinity hides entries that are no tokens
            raise ModelError(NOT_FINITE)
        # the model scales and caps in its own type, rounding up to four times, the slices in fp32
        near = max(1e-3, 4 * torch.finfo(hidden.dtype).eps)
        largest = float(theirs.nan_to_num(neginf=0.0).abs().max())
        same = mine.shape == theirs.shape
        if not same or not torch.allclose(mine, theirs, rtol=near, atol=1e-3 * largest):
            replaced = "forward" in vars(self.model)
            raise ModelError(
                f"{name} computes its logits in a way kvsearch does not know"
                + ("; its forward was replaced, as for mixed precision: give it without that"
                   if replaced else "")
            )  # fmt: skip
        return theirs.shape[-1]

    def hidden(self, ids: Tensor, cache: Any) -> Tensor:
        """Last hidden states `[B, T, hidden]` of tokens `[B, T]` that a cache takes in."""
        found = list[Tensor]()
        goes_on = ids.shape[1] > 1 and len(_states(cache)) > 0
        for part in ids.split(1 if goes_on and self._restarts else ids.shape[1], 1):
            at, seen = {}, cache.get_seq_length()
            if seen and self._turns:
                places = torch.arange(seen, seen + part.shape[1], device=ids.device)
                at["position_ids"] = places[None]
            with _eagerly():
                out = self.body(part, past_key_values=cache, use_cache=True, **at)
            found.append(out.last_hidden_state)
        return torch.cat(found, 1) if len(found) > 1 else found[0]

    @cached_property
    def _turns(self) -> bool:
        """Whether the model turns keys by positions that it takes; Bamba's own start at zero."""
        asked = inspect.signature(self.body.forward).parameters
        return self._rope is not None and "position_ids" in asked

    @cached_property
    def _restarts(self) -> bool:
        """Whether calls of several tokens begin linear attention anew, as those of Jamba do.

        Such a model goes on from its state with single tokens only, as when it decodes.
        """
        ids = torch.arange(3, device=entrance(self.model))[None]
        with torch.inference_mode(), _eagerly():
            cache = self.body(ids[:, :1], use_cache=True).past_key_values
            for x in _states(cache):
                x.fill_(torch.nan)  # whatever reads it is no number
            out = self.body(ids[:, 1:], past_key_values=cache, use_cache=True)
        return bool(out.last_hidden_state.isfinite().all())

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[B, T, vocabulary]` in fp32."""
        x: Tensor = self.out(hidden).float()
        if self.factor != 1.0:
            x = x * self.factor
        x = x if self.cap is None else self.cap * torch.tanh(x / self.cap)
        if self.silent is not None:
            x[..., self.silent] = LOW
        return x

    def nll(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """NLL of tokens 1 .. T-1 `[B, T - 1]`."""
        parts = []
        for start in range(0, ids.shape[1] - 1, ROWS):
            stop = min(start + ROWS, ids.shape[1] - 1)
            logits = self.logits(hidden[:, start:stop])
            target = ids[:, start + 1 : stop + 1]
            # in rows: a transposed vocabulary would be copied first
            lost = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
            lost = lost.view(target.shape)
            parts.append(lost if self.silent is None else lost * (target != self.silent))
        return torch.cat(parts, 1)

    def expected(self, hidden: Tensor) -> Iterator[Tensor]:
        """Log-probabilities of the next token `[B, ROWS, vocabulary]`, slice by slice."""
        for start in range(0, hidden.shape[1], ROWS):
            yield self.logits(hidden[:, start : start + ROWS]).log_softmax(-1)

    def divergence(self, expected: Iterable[Tensor], hidden: Tensor) -> Tensor:
        """KL divergence from the unmodified model's next-token distributions to those of `hidden`.

        Args:
            expected: `expected` of the same tokens' hidden states in the unmodified model.
            hidden: last hidden states `[B, T, hidden]` of the model with a smaller cache.

        Returns:
            Nats `[B, T]`, the divergence at every token.
        """
        pairs = zip(expected, self.expected(hidden), strict=True)
        return torch.cat([(right.exp() * (right - left)).sum(-1) for right, left in pairs], 1)
