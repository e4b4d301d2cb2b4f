"""Policies by age: when a slot is evicted is known before the pass, so it is a mask."""
