"""Metadata shards of a pool of two nodes: added where there are fewest, or on the node that the operator names."""

import pytest

from nvpool.testing.env import namespaces
from nvpool.testing.env.etcd_members import until
from nvpool.testing.env.multi_node_pool import Pool
from nvpool.testing.env.namespaces import Machines

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "")


@pytest.mark.smoke
def test_shard_is_added_on_an_empty_or_a_named_node():
    with Machines(2) as hosts:
        pool = Pool(hosts, plain=True)
        first, second = pool.nodes
        path = str(first.path)
        try:
            pool.join(second, pool.found())
            first.until_all_serve()
            added = first.json("shard", "add", path, "--wait")
            assert added["shard"] == 2 and added["node"] == 2
            shards = {one["shard"]: one for one in first.json("shard", "ls", path)}
            assert shards[2]["node"] == 2 and shards[1]["partitions"] == shards[2]["partitions"] == 2048
            second.kill_all()
            said = first.nvpool("shard", "add", path, "--node", "2")
            assert "shard 3 is to be made on node 2" in said.stdout
            assert first.json("shard", "add", path, "--number", "3")["state"] == "wanted", "once"
            assert {one["shard"]: one["state"] for one in first.json("shard", "ls", path)}[3] == "wanted"
            second.serve()
            until(
                lambda: any(
                    one["shard"] == 3 and one["node"] == 2 and one["partitions"] > 1000
                    for one in first.json("shard", "ls", path)
                ),
                "its node has made it",
                first,
            )
            refused = first.nvpool("shard", "add", path, "--node", "9", check=False)
            assert refused.returncode == 1 and "node 9 is not in the pool" in refused.stderr
        finally:
            for node in pool.nodes:
                node.kill_all()
