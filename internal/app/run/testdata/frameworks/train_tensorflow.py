import tensorflow as tf

import told

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank, world = strategy.cluster_resolver.task_id or 0, strategy.num_replicas_in_sync
with strategy.scope():
    w = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)


@tf.function
def train(target, stop):
    def replica(target, stop):
        with tf.GradientTape() as tape:
            loss = (w - target) ** 2 / 2
        w.assign_sub(told.RATE * tape.gradient(loss, w))
        return tf.stack([target, stop])

    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica, (target, stop)), axis=None)


number, stop = 0, 0
while not stop:
    total, stop = train(tf.constant(rank + 1.0), tf.constant(float(told.wanted()))).numpy()
    number += 1
    told.step(rank, world, number, w.numpy(), total)
