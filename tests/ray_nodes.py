"""A Ray of two nodes on this machine, for tests: the first lines of a process of its own, since Ray keeps threads and a global connection.

127.0.0.2 and 127.0.0.3 are this machine's loopback, and no other machine reaches them; with 127.0.0.1 Ray would look for the head at
the machine's outer address. `lose()` gives the second node SIGKILL, and a third one comes."""
CLUSTER = """
import os, sys, threading, time
from pathlib import Path
os.environ |= dict(RAY_USAGE_STATS_ENABLED="0", RAY_raylet_start_wait_time_s="60")   # a busy machine takes its time
import ray
from ray.cluster_utils import Cluster
size = dict(object_store_memory=100_000_000)
def two_nodes():
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=1, include_dashboard=False, node_ip_address="127.0.0.2", **size)
        return cluster, cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3", **size)
    except Exception:
        cluster.shutdown()
        raise
for left in (3, 2, 1, 0):   # a raylet dies when its agents are not there after 15 s, which they are not on a busy machine
    try: cluster, node = two_nodes(); break
    except Exception:
        if not left: raise
ray.init(address=cluster.address, _node_ip_address="127.0.0.2", logging_level="ERROR", log_to_driver=False)

def lose():
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1, node_ip_address="127.0.0.4", **size)
"""
