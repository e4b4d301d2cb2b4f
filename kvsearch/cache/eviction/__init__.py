"""The eviction loop: sums of attention, new tokens in the places of evicted ones."""
