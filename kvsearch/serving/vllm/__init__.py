"""The vLLM plugin: `vllm serve` with a policy named holds every request's cache as it says.

The entry point `vllm.general_plugins` is `plugin.install`. Everything here is written against some
minor versions of vLLM, see `names.VERSIONS`.
"""
