"""What the plugin speaks and what names a policy to it."""

VERSIONS = "0.31", "0.32", "0.33"  # of vLLM; of the last, only interfaces were tried
POLICY = "KVSEARCH_POLICY"  # environment variable with a policy file
OPTION = "kvsearch_policy"  # the same in --additional-config, which comes first
