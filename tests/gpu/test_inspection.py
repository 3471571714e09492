import pytest

from cutlass_ops.base import arch
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.config import ThreadblockShape, WarpShape
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Node, Output
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.tools import inspection
from cutlass_ops.tools.inspection import inspect

CONFIGS = [
    Sm80Config(threadblock=ThreadblockShape(128, 128, 32), warp=WarpShape(64, 64, 32)),
    Sm90Config(threadblock=ThreadblockShape(64, 128, 64)),
]


@pytest.mark.gpu
@pytest.mark.compile
def test_the_driver_confirms_what_was_computed(monkeypatch):
    import torch

    capability = torch.cuda.get_device_capability()
    epilogue = Graph((), (Node("acc"),), (Output("d", 0),))
    targets = [(config, arch.target_for(capability, config.family)) for config in CONFIGS]
    specs = [
        KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=epilogue, config=config, target=target.name)
        for config, target in targets
        if target is not None
    ]
    for artifact in build_many(specs):
        asked = inspect(artifact)
        assert asked.device == torch.cuda.get_device_name()
        with monkeypatch.context() as patch:
            patch.setattr(inspection, "_find_device", lambda target: None)
            computed = inspect(artifact)
        assert computed.device is None
        assert asked.blocks_per_sm == computed.blocks_per_sm
