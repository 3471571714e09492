"""What every other room uses and that knows nothing of GEMMs.

Element types and what the hardware offers, errors, environment variables, files, locks and processes.
It imports no other room.
"""
