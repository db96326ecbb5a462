"""Random histories of DLRover's NetworkCheckRendezvousManager, for the tests of agents.

Run it with a Python that has the package dlrover 0.6.1: check.py > check.json. Histories have none of its known
defects: all nodes come to every round, no two times are alike, and what has begun with a straggler or a fault has its
second round.
"""

import json
import random
import sys

from dlrover.python.master.elastic_training.rdzv_manager import NetworkCheckRendezvousManager


def a_round(rng, manager, nodes, bad, slow):
    order = list(range(nodes))
    rng.shuffle(order)
    for rank in order:
        manager.join_rendezvous(100 + rank, rank, 1)
    groups = {}
    for rank in range(nodes):
        number, group, world = manager.get_comm_world(rank)
        groups[group] = list(world)
    times = []
    for rank in range(nodes):
        at = next(g for g in groups.values() if rank in g)
        t = 1 + rank / 1000 + rng.randrange(300) / 100000 * 100
        if any(r in slow for r in at):
            t *= 5
        if any(r in bad for r in at):
            t = 3600 + rank
        times.append(round(t, 3))
    for rank in range(nodes):
        manager.report_network_check_result(rank, times[rank] < 3600, times[rank])
    faults, reason = manager.check_fault_node()
    stragglers, _ = manager.get_straggler()
    return {"order": order, "times": times, "groups": [groups[g] for g in sorted(groups)], "round": number,
            "faults": sorted(faults), "reason": reason, "slow": sorted(stragglers)}


def history(rng):
    nodes = rng.randrange(1, 10)
    manager = NetworkCheckRendezvousManager()
    manager.update_rdzv_params(nodes, nodes, 30, 1)
    checks = []
    for _ in range(rng.randrange(1, 4)):
        bad = set(rng.sample(range(nodes), rng.randrange(0, min(nodes, 3))))
        slow = set(rng.sample(range(nodes), rng.randrange(0, min(nodes, 3))))
        checks.append(a_round(rng, manager, nodes, bad, slow))
        if checks[-1]["faults"] or checks[-1]["slow"]:
            checks.append(a_round(rng, manager, nodes, bad, slow))
    return {"nodes": nodes, "checks": checks}


rng = random.Random(1)
sys.stdout.write("[\n" + ",\n".join(json.dumps(history(rng)) for _ in range(200)) + "\n]\n")
