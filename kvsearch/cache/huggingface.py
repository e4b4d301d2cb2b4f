"""`PolicyCache`: a policy as a Hugging Face cache. Only this and `hybrid` import their interface.

transformers hands new keys and values to a cache layer, and the result to an attention function
chosen by name. Our layer returns the new keys marked with itself; `wrappers` finds the mark and
lets the layer attend over what it holds. The model gets hooks at most, and two wrappers.
"""

import os
from collections.abc import Sequence
from copy import deepcopy
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from kvsearch.cache.channels import views
from kvsearch.cache.generate_inputs import Given, require_tokens, watch_generate
from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.hybrid import HybridLayer, attending, placed
from kvsearch.cache.layer import Layer, empty_layers
from kvsearch.cache.model.anchors import stream
from kvsearch.cache.model.projections import maps, outputs
from kvsearch.cache.model.rotary import Rotary, frequencies, rotaries
from kvsearch.cache.padded import PaddedBatch
from kvsearch.cache.rereading import rereading
from kvsearch.cache.ways import CAPPED, advance
from kvsearch.cache.wrappers import MARK, route
from kvsearch.errors import ModelError, PolicyError
from kvsearch.models.sample import sample
from kvsearch.models.shape import (
    angle_switch,
    body,
    entrance,
    policy_layers,
    require_wiring,
    shape_of,
    text_config,
    unwrapped,
)
from kvsearch.models.shared import policy_file
from kvsearch.policy import Policy, check

_CALLS = count(1)  # of models with any cache


class PolicyLayer(CacheLayerMixin):
    """One layer's slots under a policy. `keys` and `values` stay empty: `held` has them.

    Attributes:
        held: what it holds; where sequences are padded, this only counts tokens.
        waits: whether it was given keys that nobody has attended to since.
        rows: sequences that it holds.
        padded: what it holds of each of them, where some are padded.
        config: of the model that it is for, as far as that is known.
        switch: see `angle_switch`.
        call: number of the call that handed over its newest keys; 0 before.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, held: Layer, config: Any = None) -> None:
        super().__init__()
        self.held, self.waits, self.rows, self.call = held, False, 0, 0
        self.config, self.padded = config, cast(PaddedBatch | None, None)
        self.switch = None if config is None else angle_switch(config)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Mark the new keys with this layer; they are stored when attention runs."""
        self.is_initialized, rows = True, key_states.shape[0]
        if self.held.seen and rows != self.rows:
            raise ModelError(
                f"this call brings {rows} sequences to a cache that holds {self.rows}; repeat "
                "those with its batch_repeat_interleave(n), or make a new cache"
            )
        self.rows = rows
        if not key_states.shape[-1]:  # a pruned model's layer without attention: nobody attends
            self.held.seen += key_states.shape[2]
        self.waits = bool(key_states.shape[-1])
        marked = key_states.view_as(key_states)
        setattr(marked, MARK, self)
        return marked, value_states

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # tokens differ in what they do
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> Tensor:
        """Take in new tokens and attend from them, in the types that the policy has."""
        if torch.is_autocast_enabled(q.device.type):  # it hands over values of another type
            with torch.autocast(q.device.type, enabled=False):
                return self.attend(q, k, v.to(k.dtype), scale=scale, softcap=softcap)
        if self.padded is None:
            return advance(self.held, q, k, v, scale=scale, softcap=softcap)
        predicted = self.held.predicted
        return self.padded.attend(q, k, v, predicted, scale=scale, softcap=softcap)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Lengths for a mask, as if nothing had been evicted."""
        require_tokens(query_length, self.held.seen)
        return self.held.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen, which is what positions follow from; not those held."""
        return self.held.seen

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.held.reset()
        self.is_initialized, self.waits, self.padded = False, False, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select batch rows (beam search)."""
        if self.padded is None:
            self.held.reorder(beam_idx)
        else:
            self.padded.reorder(beam_idx.tolist())
        self.rows = len(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select batch rows; transformers has two names for it."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        self.reorder_cache(torch.arange(self.rows, device="cpu").repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: tokens leave slots by the policy only, and what left cannot be brought back."""
        if tokens_to_remove:
            raise PolicyError(
                "a policy cache cannot be rolled back, as assisted generation asks; generate "
                "without assistant_model, prompt_lookup_num_tokens and assistant_early_exit"
            )


class PolicyCache(Cache):
    """A cache that really holds what a policy says; goes into `model.generate(past_key_values=)`.

    Layers with full attention follow the policy, others keep transformers' caches. It holds one
    sequence or batch, which may be padded on the left; call `reset()` before the next prompt.

    Args:
        policy: what to hold.
        model: the model that will use the cache, or a PEFT or compiled model around it.
        packed: hold real formats; False holds equal dense values, for evaluation.
        native: 16-bit storage type; by default the model's type, or fp16 for an fp32 model.
        fast: use one-pass replays for many tokens at once.
        tokenizer: of the model; needed where anchors, or tokens, follow from a text.

    Raises:
        TypeError: `policy` is no `Policy`, but the name of one, for instance.
        PolicyError: the model's shape, or its tokenizer, cannot run the policy.
        ModelError: the model cannot be served (no re-indexable RoPE where the policy asks for it).
    """

    def __init__(
        self,
        policy: Policy,
        model: PreTrainedModel,
        *,
        packed: bool = True,
        native: torch.dtype | None = None,
        fast: bool = True,
        tokenizer: Any = None,
    ) -> None:
        if not isinstance(policy, Policy):
            got = f"PolicyCache takes a Policy, got {type(policy).__name__}"
            raise TypeError(f"{got}; read a file with PolicyCache.from_json(file, model)")
        model = unwrapped(model)
        shape = shape_of(model.config)
        check(policy, shape)
        require_attention(model)
        if policy.offset is not None:
            policy.offset.check_model(sample(model))
            if capped(model):
                raise ModelError(CAPPED)
        turns: list[Rotary | None] = [None] * shape.layers
        rule = policy.active_rule
        if policy.drops and policy.positions == "cache":
            turns = rotaries(model, _seen, "positions 'cache'", "use positions 'original'")
        elif rule is not None and "queries" in rule.needs:
            turns = rotaries(model, _seen, f"rule {rule.name!r}", "use another rule")
        lost = views(policy, shape, lambda *say: frequencies(model, _seen, *say))
        if native is None:
            native = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float16
        self.stream = stream(policy, model, tokenizer)
        self.rereading = rereading(policy, model, tokenizer)
        made = empty_layers(
            policy, shape, turns, lost, packed=packed, native=native, fast=fast,
            stream=self.stream, outputs=outputs(policy, model), predictors=maps(policy, model),
        )  # fmt: skip
        config = text_config(model.config)
        super().__init__(layers=placed(model, [PolicyLayer(layer, config) for layer in made]))
        if self.rereading is not None and any(isinstance(x, HybridLayer) for x in self.layers):
            raise ModelError(
                "a second reading of the prompt would go on with the linear attention that layers "
                f"of this {config.model_type!r} model have beside the other; use another rule"
            )
        self.policy, self.shape = policy, shape
        self.given = Given(whole=policy.after_prompt)
        self._waiting: PolicyLayer | None = None  # the layer that was last given keys
        self._at, self._call = len(self.layers), 0  # that layer, and the number of its call

    @classmethod
    def from_json(
        cls, source: str | os.PathLike[str], model: PreTrainedModel, **options: Any
    ) -> "PolicyCache":
        """Read a policy file and build its cache for `model`."""
        return cls(Policy.from_json(source), model, **options)

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], model: PreTrainedModel, **options: Any
    ) -> "PolicyCache":
        """The cache of a shared policy: hub id `owner/name` (and `revision`), folder or file."""
        file = policy_file(os.fspath(name), options.pop("revision", None))
        return cls.from_json(file, model, **options)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand new keys and values to their layer, if the layer before it was attended through."""
        if self._waiting is not None and self._waiting.waits:
            self._waiting.waits = False
            raise ModelError(
                "the model does not attend through this cache: its attention does not ask "
                "transformers' attention interface for a function; choose another one, as with "
                "model.set_attn_implementation('sdpa')"
            )
        layer = attending([self.layers[layer_idx]])[0]
        self._waiting = layer if isinstance(layer, PolicyLayer) else None
        if layer_idx <= self._at:
            self._call = next(_CALLS)
        self._at = layer_idx
        if self._waiting is not None:
            self._waiting.call = self._call
        found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return cast(tuple[Tensor, Tensor], found)

    def reset(self) -> None:
        """Forget everything: the next call brings the first tokens of a sequence."""
        super().reset()
        self.given.forget()
        self._waiting = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select batch rows (beam search)."""
        self.given.select(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select batch rows."""
        self.given.select(indices)
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        rows = next(x.rows for x in attending(self.layers) if isinstance(x, PolicyLayer))
        self.given.select(torch.arange(rows, device="cpu").repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)

    @property
    def _is_user_defined(self) -> bool:
        """Set by `generate` when it begins with a cache that it did not make."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self.given.begin()

    @property
    def held(self) -> list[Layer]:
        """What the policy's layers hold, shallow to deep; of a padded batch each's fullest row."""
        mine = (x for x in attending(self.layers) if isinstance(x, PolicyLayer))
        return [x.held if x.padded is None else x.padded.fullest for x in mine]

    @property
    def groups(self) -> list[HeadGroup]:
        """Groups of KV heads of these layers, shallow to deep: each holds its own slots."""
        return [group for layer in self.held for group in layer.groups]

    @property
    def unfitted(self) -> int:
        """Heads, over layers and sequences, that kept their values where `refit` was asked for."""
        return sum(group.unfitted for group in self.groups)

    @property
    def bytes_resident(self) -> int:
        """Bytes per sequence that the policy's layers hold now, summed over real tensors."""
        return sum(layer.nbytes for layer in self.held)

    @property
    def bytes_peak_resident(self) -> int:
        """Most bytes of each layer after any call, summed; a call of many tokens may hold less."""
        return sum(layer.peak_bytes for layer in self.held)

    def fork(self) -> "PolicyCache":
        """A copy that goes on by itself, exactly as this one would: for prompts with one prefix."""
        same: list[Any] = [x for layer in self.held for x in layer.shared]
        same += [
            self.shape,
            self.policy,
            *(getattr(x, "config", None) for x in attending(self.layers)),
        ]
        return deepcopy(self, {id(x): x for x in same if x is not None})


def full_cache(model: PreTrainedModel) -> Cache:
    """The unmodified full cache of `model`, to compare with."""
    return DynamicCache(config=model.config)


def require_attention(model: PreTrainedModel) -> None:
    """Let models attend through policy caches, and ask `model` once whether it does.

    Raises:
        ModelError: some layer of the model would not attend through its policy cache.
    """
    if model.training and any(getattr(x, "gradient_checkpointing", 0) for x in model.modules()):
        raise ModelError(
            "a model with gradient checkpointing does not use caches while it trains; call "
            "model.eval() or model.gradient_checkpointing_disable()"
        )
    route()
    watch_generate(model)
    if model not in _attends:
        require_wiring(model, [recorder.calls for recorder in _record(model)])
        _attends[model] = None


def capped(model: PreTrainedModel) -> bool:
    """Whether a model bounds its attention scores, which an offset of keys would change."""
    return bool(getattr(text_config(model.config), "attn_logit_softcapping", None))


def turning(model: PreTrainedModel, what: str, instead: str) -> list[Tensor]:
    """Angle per position of each channel pair of every policy layer, see `frequencies`."""
    return frequencies(model, _seen, what, instead)


# -- asking a model once -----------------------------------------------------------------------

_attends: WeakKeyDictionary[PreTrainedModel, None] = WeakKeyDictionary()


class Watching(PolicyLayer):
    """A layer that holds nothing and only sees what attention calls hand over."""

    def __init__(self) -> None:
        super().__init__(Layer(Policy(), (), packed=False))


class _Recorder(Watching):
    """Notes the tensors of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        """One token that attends to itself gets its own value, whatever the scale or the cap."""
        self.calls.append((q, k, v))
        return v.repeat_interleave(q.shape[1] // k.shape[1], 1)


def watched(model: PreTrainedModel, layers: Sequence[PolicyLayer]) -> Cache:
    """A cache for one call of `model`, whose layers with full attention are `layers`."""
    require_attention(model)
    return Cache(layers=placed(model, layers))


def _record(model: PreTrainedModel, positions: list[int] | None = None) -> list[_Recorder]:
    """Show `model` one token, alone at each of `positions`, and note what attention is given.

    A token that is alone attends to itself only. So hidden states do not depend on its position,
    in any layer and whatever lies between the layers, unless the model adds positions to them.
    """
    recorders = [_Recorder() for _ in policy_layers(model.config)]
    cache, shown = Cache(layers=placed(model, recorders)), len(positions or [0])
    # not token 0: that is often padding, whose embedding is zero
    token = text_config(model.config).vocab_size // 2
    ids = torch.full((shown, 1), token, device=entrance(model))
    at = {} if positions is None else {"position_ids": torch.tensor(positions).view(-1, 1).to(ids)}
    with torch.no_grad():
        try:
            body(model)(input_ids=ids, past_key_values=cache, use_cache=True, **at)
        except ModelError:
            raise
        except (AttributeError, TypeError, ValueError) as e:
            raise ModelError(
                f"{type(model).__name__} does not run on tokens and a cache alone: {e}"
            ) from e
    return recorders


def _seen(model: PreTrainedModel, positions: list[int]) -> list[list[Tensor]]:
    """Queries and keys that each layer's attention is given of one token at each of `positions`."""
    return [[x for call in r.calls for x in call[:2]] for r in _record(model, positions)]
