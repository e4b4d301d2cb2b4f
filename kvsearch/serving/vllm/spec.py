"""How vLLM's scheduler counts a request: blocks as large as the policy makes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvsearch.serving.account import Account


@dataclass(frozen=True, kw_only=True)
class PolicySpec(AttentionSpec):
    """One layer's blocks. All layers of a model have the same.

    Attributes:
        account: bytes and reach of the blocks.
    """

    account: Account

    @classmethod
    def of(cls, account: Account, kv_heads: int, head_dim: int) -> "PolicySpec":
        """The specification of a layer with so many KV heads of so many channels."""
        size = -(-account.reach[-1] // account.most)  # tokens per block of the longest request
        return cls(
            block_size=size,
            num_kv_heads=kv_heads,
            head_size=head_dim,
            dtype=torch.uint8,
            dcp_sharded=False,
            num_head_slots=1,
            state_content_bytes=account.page,
            tokens_per_state=size,
            account=account,
        )

    @property
    def prefix_cacheable(self) -> bool:
        """Never: what a block holds depends on all tokens before and after."""
        return False

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Of the longest request, in one layer."""
        longest: int = vllm_config.model_config.max_model_len
        return self.account.blocks(longest) * self.account.page

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """Length of a request's row of blocks."""
        return max(self.account.most, -(-max_len // self.block_size))


class PolicyManager(SingleTypeKVCacheManager):
    """Gives a request the blocks that its bytes fill, and shares none of them."""

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Blocks that it lacks for so many tokens."""
        have = len(self.req_to_blocks.get(request_id, ()))
        return max(0, self.kv_cache_spec.account.blocks(num_tokens) - have)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        """Those blocks."""
        new: list[Any] = []
        if lacking := self.get_num_blocks_to_allocate(request_id, num_tokens):
            new = self.block_pool.get_new_blocks(lacking)
            self.req_to_blocks[request_id].extend(new)
        return new

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        """No request takes over another's blocks."""
        return tuple([] for _ in kv_cache_group_ids), 0


def register_spec() -> None:
    """Tell vLLM which manager counts `PolicySpec`."""
    KVCacheSpecRegistry._ensure_registered()  # its own, which it only registers if there are none
    KVCacheSpecRegistry.register(PolicySpec, PolicyManager, PolicySpec)
