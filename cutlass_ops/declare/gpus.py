"""Known GPUs by name, for explaining and shipping kernels without a GPU."""

from __future__ import annotations

import re
import reprlib

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.declare.chips import CHIPS
from cutlass_ops.declare.device import Device

GPUS = {name: chip.device for name, chip in CHIPS.items()}

# The GPU for which a target's kernels are chosen. Others of its compute capability run them too.
BY_TARGET = {
    "sm_80": GPUS["NVIDIA A100-SXM4-80GB"],
    "sm_86": GPUS["NVIDIA RTX A6000"],
    "sm_89": GPUS["NVIDIA L40S"],
    "sm_90a": GPUS["NVIDIA H100 80GB HBM3"],
}
_CAPABILITIES = {target.rstrip("a"): gpu for target, gpu in BY_TARGET.items()}


def gpu_named(text: str) -> Device:
    """Return the GPU that a text names. Raises ConfigError if it names none. The message lists the known names."""
    wanted = " ".join(re.split(r"[\s_-]+", text.strip().lower()))
    number = re.fullmatch(r"(?:sm ?|compute ?)?([0-9])\.?([0-9])a?", wanted)
    if number and f"sm_{number[1]}{number[2]}" in _CAPABILITIES:
        return _CAPABILITIES[f"sm_{number[1]}{number[2]}"]
    names = {" ".join(re.split(r"[\s_-]+", name.lower())): gpu for name, gpu in GPUS.items()}
    # Whole words, so that L4 does not match L40S.
    found = [gpu for name, gpu in names.items() if wanted and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", name)]
    if not found or wanted == "nvidia":
        raise ConfigError(
            f"{reprlib.repr(text)} is not a known GPU: use {', '.join(_CAPABILITIES)}, or a part of the name of "
            f"{', '.join(GPUS)}"
        )
    return names.get(wanted, found[0])
