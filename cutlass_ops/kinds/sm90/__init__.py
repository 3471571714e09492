"""Warp-specialised TMA and wgmma kernels (CUTLASS 3.x), for sm_90a."""
