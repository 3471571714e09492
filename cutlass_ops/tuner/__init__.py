"""Measure kernels against each other and against other libraries, and store the results.

The package is not named `tune` because that is a public function. It imports only lower layers.
"""
