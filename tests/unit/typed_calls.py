"""What tests of the types beside BF16, FP16 and FP8 share."""

from signatures import H100

import cutlass_ops as co
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.operand.call import call_at, signature_of

L40S = Device((8, 9), 142, "NVIDIA L40S")
MAJORS = [("row", "row"), ("col", "row"), ("col", "col"), ("row", "col")]


@co.epilogue
def relu_bias(acc, bias: co.Row):
    return co.e.relu(acc + bias)


@co.epilogue
def centred(acc):
    return acc - co.e.mean_of_a()


def signature(dtype, a="row", b="col", device=H100, problem=(512, 4096, 4096), graph=builtin.bias.graph, **named):
    return signature_of(call_at(graph, Problem(*problem), dtype, a, b, **named), device)


def sm80(k=32, stages=3, instruction=(16, 8, 8), tile=(128, 128), warp=(64, 64)):
    shapes = co.ThreadblockShape(*tile, k), co.WarpShape(*warp, k), co.InstructionShape(*instruction)
    return co.Sm80Config(*shapes, stages=stages)
