"""What tests of the choice of a kernel have in common."""

from signatures import H100, signature

from cutlass_ops.choose import dispatch, policies, tables
from cutlass_ops.choose.tables import Point, Table
from cutlass_ops.declare.config import ThreadblockShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.sm90.config import Sm90Config

SLOW = Sm90Config(ThreadblockShape(64, 64, 64), schedule="pingpong")
ODD = Problem(640, 4224, 4032)


def chosen(shape, of=None, device=H100):
    return dispatch.choose(of or signature(), device, shape)


def user_table(*measured, problem=ODD, of=None, device=H100.name):
    of = of or signature()
    table = Table(device, 132, of, (Point(problem, "2026-11-21", measured),)).select()
    tables.update(tables.path_of(policies.env.tuning_dir(), device, of), table)
    policies.forget()
