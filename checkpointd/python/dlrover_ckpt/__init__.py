"""The engine behind the public ``dlrover`` package: checkpoints in shared memory."""
