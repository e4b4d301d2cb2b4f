"""The policy that a vLLM configuration names, ready for requests."""

import os
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from kvsearch.cache.channels import View, views
from kvsearch.cache.layer import Layer, empty_layers
from kvsearch.cache.model.rotary import Rotary
from kvsearch.errors import ModelError, RunError
from kvsearch.models.shape import shape_of
from kvsearch.policy import ModelShape, Policy, check, layout
from kvsearch.policy.schedule import Clock
from kvsearch.serving.accepts import require_servable
from kvsearch.serving.account import Account, account, waiting, waits
from kvsearch.serving.vllm.names import OPTION, POLICY


class Served:
    """A policy on a model.

    Args:
        policy: what every request holds.
        shape: of the model.
        dtype: of the model.
    """

    def __init__(self, policy: Policy, shape: ModelShape, dtype: torch.dtype) -> None:
        self.policy, self.shape = policy, shape
        half = dtype in (torch.float16, torch.bfloat16)
        self.native = dtype if half else torch.float16
        self._accounts: dict[tuple[int, int], Account] = {}

    def layers(self, prompt: int = 0) -> list[Layer]:
        """Empty layers for a new request, whose prompt has so many tokens where that matters."""
        made = empty_layers(
            self.policy, self.shape, self._rotaries, self._lost, packed=True, native=self.native
        )
        for layer in made:
            layer.expects = prompt or None
        return made

    @property
    def waits(self) -> bool:
        """Whether the policy compacts after the prompt."""
        return waits(self.policy)

    def compactions(self, before: int, end: int, prompt: int) -> int:
        """How often a request is compacted that grows from `before` to `end` tokens."""
        clock, many = Clock(self.policy.interval if self.policy.compacts else None,
                            self.policy.trigger), 0  # fmt: skip
        due = clock.after(before, prompt)
        while due is not None and due <= end:
            many, due = many + 1, clock.after(due, prompt)
        return many

    def tell_prompts(self, model_config: Any) -> None:
        """Let vLLM say how long prompts are, where the policy waits for their end.

        Both of its model runners tell a backend that for models whose sliding window begins behind
        the prompt (R-SWA), which they know by this number and ask for nothing else.
        """
        if self.waits:
            model_config.model_arch_config.rswa_window = model_config.max_model_len

    def words(self, longest: int) -> str:
        """One sentence for vLLM's log."""
        peak, full = (layout(p, self.shape).bytes_peak(longest) for p in (self.policy, Policy()))
        if not self.waits:
            return (
                f"kvsearch: a request of {longest:,} tokens takes at most {peak:,} bytes, "
                f"{100 * peak / full:.3g} % of 16 bits for every token; prefix caching is off"
            )
        sizes = layout(self.policy, self.shape)
        left, peak = sizes.bytes_at(longest, longest), waiting(sizes, longest)
        return (
            f"kvsearch: a prompt of {longest:,} tokens takes {left:,} bytes once it has been read, "
            f"{100 * left / full:.3g} % of 16 bits for every token, and up to {peak:,} before, "
            "where it comes in pieces; prefix caching is off"
        )

    def account(self, longest: int, per_block: int) -> Account:
        """What vLLM is told that requests take."""
        sizes = (longest, per_block)
        if sizes not in self._accounts:
            self._accounts[sizes] = account(self.policy, self.shape, *sizes)
        return self._accounts[sizes]

    def require_room(self, config: Any) -> None:
        """Raise a `RunError` where the memory that vLLM is given holds not one request."""
        memory, longest = (
            config.cache_config.kv_cache_memory_bytes,
            config.model_config.max_model_len,
        )
        if memory is None:
            return
        counted = self.account(longest, config.cache_config.block_size or 16)
        need = (counted.most + 1) * counted.page * self.shape.layers  # a block is nobody's
        if need > memory:
            raise RunError(
                f"--kv-cache-memory-bytes {memory:,} holds not one request of {longest:,} tokens, "
                f"for which this policy needs {need:,}; raise it, or lower --max-model-len"
            )

    @cached_property
    def _rotaries(self) -> list[Rotary | None]:
        """Looked up when the model is built: the first request needs them."""
        rule, n = self.policy.active_rule, self.shape.layers
        if self.policy.drops and self.policy.positions == "cache":
            return [Rotary(_frequencies(n, "positions 'cache'", "use positions 'original'")[0])] * n
        if rule is not None and "queries" in rule.needs:
            return [Rotary(_frequencies(n, f"rule {rule.name!r}", "use another rule")[0])] * n
        return [None] * n

    @cached_property
    def _lost(self) -> list[View | None]:
        n = self.shape.layers
        return views(self.policy, self.shape, lambda what, instead: _frequencies(n, what, instead))


def _frequencies(layers: int, what: str, instead: str) -> list[Tensor]:
    from kvsearch.serving.vllm.rope import frequencies

    return frequencies(layers, what, instead)


def policy_file(config: Any) -> str | None:
    """The policy file that a configuration names, or the environment; None if neither does."""
    more = config.additional_config
    named = more.get(OPTION) if isinstance(more, dict) else None
    return named or os.environ.get(POLICY) or None


def served(config: Any) -> Served | None:
    """The policy of a configuration; None where it names none, or has no model.

    Raises:
        PolicyError: the file is no policy, or one that this model or a server cannot run.
        ModelError: the model has layers that no policy governs.
    """
    file = policy_file(config)
    if file is None or config.model_config is None:
        return None
    shape = _shape(config.model_config.hf_config)
    changed = os.stat(file).st_mtime_ns if os.path.exists(file) else 0
    return _read(os.path.abspath(file), changed, shape, config.model_config.dtype)


@lru_cache(maxsize=8)
def _read(file: str, changed: int, shape: ModelShape, dtype: torch.dtype) -> Served:
    policy = Policy.from_json(file)
    require_servable(policy)
    check(policy, shape)
    return Served(policy, shape, dtype)


def _shape(hf_config: Any) -> ModelShape:
    shape = shape_of(hf_config)
    if shape.others:
        raise ModelError(
            "this model has layers without full attention beside those that a policy governs; the "
            "vLLM plugin serves models in which every layer has full attention"
        )
    return shape


def require_config(config: Any) -> None:
    """Raise a `RunError` where an option of vLLM cannot go with a policy."""
    no = "a kvsearch policy cannot go with "
    if config.parallel_config.world_size > 1:
        raise RunError(f"{no}several workers: leave tensor and pipeline parallel sizes at 1")
    if config.speculative_config is not None:
        raise RunError(f"{no}speculative decoding, which takes tokens back: evicted ones are gone")
    if config.kv_transfer_config is not None:
        raise RunError(f"{no}KV transfer, which moves vLLM's own blocks")
    if getattr(config.model_config, "use_mla", False):
        raise RunError(f"{no}latent attention, whose cache has no keys and values")
    if config.cache_config.cache_dtype != "auto":
        raise RunError(f"{no}--kv-cache-dtype: the policy says how keys and values are stored")
