"""What a kernel is, as frozen values: configuration, specification, signature, device.

Values only: whether they fit together is asked in `kinds`. It imports `base` and `epilogue`.
"""
