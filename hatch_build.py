"""Tags the wheel for the one platform that it serves, and makes of README.md the long description."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

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


def absolute(text: str, repository: str) -> str:
    """Return a document of the top folder with links into the repository in the place of relative ones."""
    return re.sub(r"(\]\()(?!\w+:|#)([^)]+\))", rf"\g<1>{repository}/blob/main/\g<2>", text)


class ReadmeHook(MetadataHookInterface):
    """What hatchling asks for the long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set it."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
