"""A GPU in software: what Triton compiles, as PTX, carried out with NumPy, a warp at a time.

Triton's interpreter runs a kernel's Python. This runs what the compiler made of it: layouts, tiles
that are loaded ahead, operands of tensor cores, inline asm. It is stricter than a GPU. Errors are:
a read outside of every tensor, an address that is not aligned, a lane that is missing from an
exchange, two warps at one byte of shared memory without a barrier between them, and two programs
that write different bytes to one place. What a warp reads where another has written without a
barrier is any number. A copy to shared memory has destroyed what was there when it is asked for,
and arrives when it is waited for, no sooner.

It is not a GPU: it does not run what `ptxas` makes of the PTX, products of tensor cores are added
up without rounding between, and programs run one after the other.
"""
