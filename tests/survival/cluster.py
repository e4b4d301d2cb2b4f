"""A Ray cluster for all tests, in a process of its own; it ends with its stdin.

Drivers connect to the address that it prints, so that a killed one costs no new cluster.
"""

import sys

from kvsearch.policy_search.executors.cluster import Cluster

if __name__ == "__main__":
    ray = Cluster("local", 4)
    print(ray.ray.get_runtime_context().gcs_address, file=sys.__stdout__, flush=True)
    sys.stdin.read()
    ray.close()
