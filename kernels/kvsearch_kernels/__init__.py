"""Operations of a compressed KV cache, each with a torch reference that defines its meaning."""
