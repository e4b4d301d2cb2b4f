"""A decoded token: one op for all heads of a layer, over packed slots."""
