import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import told

jax.distributed.initialize()
rank, world = jax.process_index(), jax.process_count()
mesh = Mesh(np.array(jax.devices()), "ranks")
shared, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("ranks"))


def everywhere(value):
    """One element of a global array for each rank."""
    return jax.make_array_from_process_local_data(split, np.array([value], np.float32))


@jax.jit
def train(w, targets, stops):
    loss = lambda w: jnp.mean((w - targets) ** 2) / 2
    return w - told.RATE * jax.grad(loss)(w), jnp.sum(targets), jnp.max(stops)


targets = everywhere(rank + 1)
w = jax.device_put(np.float32(0), shared)
number, stop = 0, 0
while not stop:
    w, total, stop = train(w, targets, everywhere(told.wanted()))
    number += 1
    told.step(rank, world, number, w, total)
