"""A Ray of two nodes on this machine, for tests: the first lines of a process of its own, since Ray keeps threads and a global connection.

127.0.0.2 and 127.0.0.3 are this machine's loopback, and no other machine reaches them; with 127.0.0.1 Ray would look for the head at
the machine's outer address. `lose()` gives the second node SIGKILL, and a third one comes."""
CLUSTER = """
import os, sys, threading, time
from pathlib import Path
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
from ray.cluster_utils import Cluster
size = dict(object_store_memory=100_000_000)
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1, include_dashboard=False, node_ip_address="127.0.0.2", **size))
node = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3", **size)
ray.init(address=cluster.address, _node_ip_address="127.0.0.2", logging_level="ERROR", log_to_driver=False)

def lose():
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1, node_ip_address="127.0.0.4", **size)
"""
