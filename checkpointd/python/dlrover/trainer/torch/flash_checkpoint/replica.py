"""Copies on other nodes are made by the checkpoint daemons; DLRover has classes for them here."""

from __future__ import annotations

from ._lacking import lacking

__getattr__ = lacking(__name__, dict.fromkeys(
    ["CkptReplicaManger", "ShardCkptReplicaManager", "FullCkptReplicaManager"],
    "pass replica_count to the checkpointer, or --ckpt-replicas to dlrover-run"))
