"""Tags the wheel for the one platform that it serves, and says which one where another builds it."""

from __future__ import annotations

import platform
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# It holds no machine code: this is what PyTorch's wheels need, and kernels are compiled for (docs/deployment.md).
TAG = "py3-none-manylinux_2_28_x86_64"


class PlatformHook(BuildHookInterface):
    """What hatchling asks before it builds a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the tag, or refuse."""
        here = f"{sys.platform} on {platform.machine()}"
        if here != "linux on x86_64":
            raise RuntimeError(
                f"cutlass_ops needs Linux on x86-64, and this is {here}: install it there. On Windows, WSL 2 is one"
            )
        build_data["pure_python"] = False
        build_data["tag"] = TAG
