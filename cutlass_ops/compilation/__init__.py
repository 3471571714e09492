"""From a declaration to an artifact: which compilers there are, what a build depends on, and one build for all.

Not `build`, which is the name of a public function. It imports the rooms below, and nothing that chooses or calls.
"""
