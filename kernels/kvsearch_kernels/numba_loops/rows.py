"""Places in the rows of integers by which loops are told of tensors."""

# One side of a part, keys or values, as `numba_args.side` says it: where vectors are, with strides
# in bytes; where scales are, with strides in numbers; tokens that the first group of scales lacks;
# and the format.
(
    AT, STRIDE_B, STRIDE_H, STRIDE_N, SCALES, SCALE_B, SCALE_H, SCALE_N, SCALE_G,
    LEAD, KIND, WIDTH, BITS, GROUP, NUMBERS, EVEN, FIRST, TABLE, BLOCK, ALONG, PIECE,
) = range(21)  # fmt: skip
SIDE = 21
SLOTS, LENGTHS = 2 * SIDE, 2 * SIDE + 1  # of a part: slots, and where those in use are, or 0
HEADS = 15  # integers of a row of heads, before those of their angles
FP16, BF16, SINGLE, DOUBLE, PACKED = range(5)  # kinds
# How keys of a layer's heads are turned, as `decode_step.numba_impl` says it: angles, pairs of
# channels that turn (0: keys are as they are), what slots are numbered by, with strides, and slots
# of other parts than the pool.
ANGLES, PAIRS, INDEX, BEFORE, TURN = 0, 1, 2, 6, 7
# Where tokens enter a tier at once, behind the integers of angles, as `decode_step.entering` says
# it: addresses of the count (0: they do not enter), of births with strides, and of divisors.
ENTERS = HEADS + TURN
COUNT, TARGET, SINKS, RECENT, FORGETS, BORN, BORN_B, BORN_V, DIVISORS = range(9)
ENTER = 9  # integers
FINE = 64  # angles of as many positions, then of multiples of that: any other is a sum of two
