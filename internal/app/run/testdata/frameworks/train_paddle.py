import paddle
import paddle.distributed as dist

import told

paddle.set_device("cpu")
dist.init_parallel_env()
rank, world = dist.get_rank(), dist.get_world_size()
model = paddle.nn.Linear(
    1, 1, weight_attr=paddle.ParamAttr(initializer=paddle.nn.initializer.Constant(0.0)), bias_attr=False
)
parallel = paddle.DataParallel(model)
optimizer = paddle.optimizer.SGD(told.RATE, parameters=parallel.parameters())
one, target = paddle.ones([1, 1]), paddle.full([1, 1], rank + 1.0)
number, stop = 0, 0
while not stop:
    loss = ((parallel(one) - target) ** 2 / 2).sum()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    sums = paddle.to_tensor([rank + 1, told.wanted()], dtype="int64")
    if world > 1:  # Paddle makes no group of one
        dist.all_reduce(sums)
    total, stop = sums.tolist()
    number += 1
    told.step(rank, world, number, model.weight.item(), total)
