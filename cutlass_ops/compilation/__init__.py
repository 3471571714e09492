"""Compile declarations into artifacts: find compilers, compute keys, build each kernel once.

The package is not named `build` because that is a public function. It imports only lower layers.
"""
