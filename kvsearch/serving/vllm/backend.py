"""Attention in vLLM: each request of a step attends over its own packed slots.

On a CPU and on CUDA alike, `cache.ways.advance` runs what the policy says; the ops below it
choose their kernels. Prompts attend one after the other. On a CPU the decoded tokens of all
requests are one call for a layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from kvsearch.cache.layer import Layer
from kvsearch.cache.ways import advance, advance_together
from kvsearch.errors import ModelError
from kvsearch.serving.table import Table
from kvsearch.serving.vllm.counters import Counts
from kvsearch.serving.vllm.served import Served, served


class PolicyBackend(AttentionBackend):
    """Attention under the policy that the configuration names."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's table that stands for backends of others."""
        return "CUSTOM"

    @classmethod
    def supports_rswa(cls) -> bool:
        """Asked where prompts have lengths, see `Served.tell_prompts`."""
        return True

    @staticmethod
    def get_impl_cls() -> type["PolicyAttention"]:
        """Runs a layer."""
        return PolicyAttention

    @staticmethod
    def get_builder_cls() -> type["StepBuilder"]:
        """Prepares a step."""
        return StepBuilder


@dataclass
class Step(AttentionMetadata):
    """The requests of one call of the model.

    Attributes:
        parts: of each request, its tokens among those of the call, how many it had before, and
            its layers.
        done: called when the last layer has attended.
    """

    parts: Sequence[tuple[slice, int, list[Layer]]]
    done: Callable[[], None]


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Finds the requests of every step by their blocks; all layers of a step share the result."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        policy = served(vllm_config)
        assert policy is not None
        if len(layer_names) != policy.shape.layers:
            raise ModelError(
                f"vLLM has {len(layer_names)} layers for a policy that governs "
                f"{policy.shape.layers}; the plugin serves models in which every layer attends"
            )
        policy.layers()  # what this model cannot do is said now, not at the first request
        self.served: Served = policy
        self.table: Table[list[Layer]] = Table(policy.layers, kv_cache_spec.account)
        self._counts, self._cache = Counts(), vllm_config.cache_config

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Step:
        """The requests of this step.

        On CUDA, rows of blocks and lengths are copied to the host: one wait a step.
        """
        common = common_attn_metadata
        starts: list[int] = common.query_start_loc_cpu.tolist()
        lengths: list[int] = common.seq_lens.tolist()
        prompts = [0] * len(lengths)
        if self.served.waits and common.rswa_prefix_lens is not None:
            prompts = common.rswa_prefix_lens.tolist()
        parts, compactions = [], 0
        for i, row in enumerate(common.block_table_tensor[: common.num_reqs].tolist()):
            part, before = slice(starts[i], starts[i + 1]), lengths[i] - starts[i + 1] + starts[i]
            if part.start == part.stop or row[0] == 0:
                continue  # padding: block 0 is nobody's
            fresh = before == 0
            held = self.table.claim(row, lengths[i], fresh=fresh, prompt=prompts[i])
            parts.append((part, before, held))
            compactions += self.served.compactions(before, lengths[i], prompts[i])
        return Step(parts, partial(self._note, compactions))

    def _note(self, compactions: int) -> None:
        block = self.kv_cache_spec.account.page * self.served.shape.layers
        self._counts.note(
            self.table, counted=self.table.blocks * block,
            room=block * (self._cache.num_gpu_blocks or 0), compactions=compactions,
        )  # fmt: skip


class PolicyAttention(AttentionImpl[Step]):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        beyond = {
            "linear position biases": alibi_slopes,
            "sliding-window layers": sliding_window,
            "layers that share a cache": kv_sharing_target_layer_name,
            "learned attention sinks": more.get("sinks"),
            "attention that is not a decoder's": None if attn_type == "decoder" else attn_type,
        }
        for what, there in beyond.items():
            if there is not None:
                raise ModelError(f"models with {what} are not supported by a policy cache")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or None
        policy = served(get_current_vllm_config())
        assert policy is not None
        self.served = policy
        self._memo: dict[str, Any] = {}  # of decoded tokens

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend from the new tokens of every request.

        Args:
            layer: vLLM's attention module.
            query: `[T, Hq, D]`, rotated; the tokens of all requests, one after the other.
            key: `[T, H, D]`, rotated.
            value: `[T, H, D]`.
            kv_cache: vLLM's; it is not used and holds nothing.
            attn_metadata: the requests; None when vLLM tries the model out.
            output: `[T, Hq, D]`, written to.
            output_scale, output_block_scale: of fused quantisation, which is not offered.
        """
        if attn_metadata is None:
            return output.zero_()
        index = extract_layer_index(layer.layer_name)
        decoded, places = list[Layer](), list[int]()
        for part, before, layers in attn_metadata.parts:
            mine = layers[index]
            if mine.seen != before:
                raise RuntimeError(f"{before} tokens before these, {mine.seen} seen")
            if before and part.stop == part.start + 1:
                decoded.append(mine)
                places.append(part.start)
                continue
            q, k, v = (x[part].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            out = advance(mine, q, k, v, scale=self.scale, softcap=self.softcap)
            output[part] = out[0].transpose(0, 1)
        if decoded:
            q, k, v = (x[places].unsqueeze(2) for x in (query, key, value))
            how: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap}
            output[places] = advance_together(decoded, q, k, v, self._memo, **how).squeeze(2)
        if index == self.served.shape.layers - 1:
            attn_metadata.done()
        return output
