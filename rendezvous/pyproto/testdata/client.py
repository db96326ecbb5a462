"""DLRover's own client against the master at DLROVER_MASTER_ADDR, for the tests of pyproto: it prints what it got as a
JSON object. Needed: the environment of an agent, and a Python with the package dlrover."""

import json

from dlrover.python.elastic_agent import master_client

c = master_client.build_master_client()
out = {"client": type(c).__name__}
out["round"] = c.join_rendezvous(0, 8, "elastic-training")
out["waiting"] = c.num_nodes_waiting("elastic-training")
world = c.get_comm_world("elastic-training", 0)
out["world"] = [world[0], world[1], list(world[2].items())]
out["params"] = c.report_rdzv_params(1, 2, 30, 1, 600)
out["set"] = c.kv_store_set("größe", b"\x00\xff")
out["get"] = c.kv_store_get("größe").hex()
if hasattr(c, "kv_store_add"):
    out["add"] = c.kv_store_add("n", 5)
    out["multi"] = {k: v.hex() for k, v in c.kv_store_multi_get(["größe"]).items()}
c.report_failures("no such file \udcff", 1, "process_error")
c.report_heart_beat(1700000000)
out["nodes"] = len(c.get_running_nodes())
out["config"] = c.get_elastic_run_config()
c.update_node_addr("worker", 0, "10.0.0.1")
c.report_used_resource(1024, 0.5, [])
out["big"] = len(c.kv_store_get("big"))
print("ANSWER " + json.dumps(out))
