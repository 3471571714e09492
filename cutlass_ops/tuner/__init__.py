"""Measuring kernels against each other and against what others offer, and keeping the result.

Not `tune`, which is the name of a public function. It imports the rooms below.
"""
