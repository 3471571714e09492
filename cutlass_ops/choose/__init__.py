"""Which kernel serves a problem: what was measured, what the models predict, and what follows.

No module here imports PyTorch. It imports the rooms below.
"""
