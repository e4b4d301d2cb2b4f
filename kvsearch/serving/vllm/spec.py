"""How vLLM's scheduler counts a request: blocks as large as the policy makes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvsearch.serving.account import Account, Row


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
        return self.account.most * self.account.page

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """Length of a request's row of blocks."""
        return max(self.account.entries, -(-max_len // self.block_size))


class PolicyManager(SingleTypeKVCacheManager):
    """Gives a request the blocks that its bytes fill, and shares none of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: dict[str, Row] = {}

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Take back what a compaction after the prompt has freed, once that has run.

        vLLM calls this before it allocates, and says here alone how long a prompt is.
        """
        account = self.kv_cache_spec.account
        if request_id not in self._rows:
            self._rows[request_id] = Row(account, self._prompt(num_prompt_tokens))
        row = self._rows[request_id]
        if row.gap and processed_computed_tokens >= row.prompt:
            self._remove_blocks_in_range(request_id, row.gap.start, row.gap.stop)

    def _prompt(self, told: int | None) -> int:
        if self.kv_cache_spec.account.after is None:
            return 0
        assert told is not None, "vLLM says how long a prompt is"
        return told

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
        **kwargs: Any,
    ) -> int:
        """Blocks that it lacks for so many tokens.

        A request is admitted when there is room for its prompt in pieces, which is how it may come.
        """
        account = self.kv_cache_spec.account
        if apply_admission_cap:
            pieces = min(num_tokens, prefill_end)
            need = max(account.blocks(pieces, pieces + 1), account.blocks(num_tokens, pieces))
            return max(0, need - len(self.req_to_blocks.get(request_id, ())))
        return self._rows[request_id].lacks(num_tokens)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        """Those blocks."""
        new: list[Any] = []
        if lacking := len(self._rows[request_id].grow(num_tokens)):
            new = self.block_pool.get_new_blocks(lacking)
            self.req_to_blocks[request_id].extend(new)
        return new

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """All of its blocks, when it ends or is preempted."""
        self._rows.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """None; vLLM 0.31 asks."""
        return 0

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
