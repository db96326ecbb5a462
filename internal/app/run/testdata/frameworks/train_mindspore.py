import mindspore as ms
from mindspore import communication, nn, ops

import told

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
communication.init()
rank, world = communication.get_rank(), communication.get_group_size()
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)


class Loss(nn.Cell):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def construct(self, x, target):
        return ((self.model(x) - target) ** 2 / 2).sum()


class Sum(nn.Cell):
    def __init__(self):
        super().__init__()
        self.reduce = ops.AllReduce(ops.ReduceOp.SUM)

    def construct(self, x):
        return self.reduce(x)


model = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
train = nn.TrainOneStepCell(Loss(model), nn.SGD(model.trainable_params(), told.RATE))
sums = Sum()
one, target = ms.Tensor([[1.0]], ms.float32), ms.Tensor([[rank + 1.0]], ms.float32)
number, stop = 0, 0
while not stop:
    train(one, target)
    total, stop = sums(ms.Tensor([rank + 1, told.wanted()], ms.float32)).asnumpy()
    number += 1
    told.step(rank, world, number, model.weight.asnumpy().item(), total)
