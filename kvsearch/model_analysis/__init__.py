"""What a model is like, measured once and kept: losses of heads, channels, layers; key offsets."""
