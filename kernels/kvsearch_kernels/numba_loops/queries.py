# mypy: ignore-errors
"""A rule's sums of queries, and of their products."""

from kvsearch_kernels.numba_loops.kept import compiled


@compiled()
def add_queries(q, total, outer):
    """Sums of queries and of their products, in place, see `sum_queries.reference`."""
    D = q.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            x, sums, first = q[b, h], total[b, h], 0
            for i in range(D):
                sums[i] += x[i]
            if outer.size == 0:
                continue
            for i in range(D):
                row, factor = outer[b, h, first : first + D - i], x[i]
                for j in range(D - i):
                    row[j] += factor * x[i + j]
                first += D - i
