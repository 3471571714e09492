"""What the kernels of a program do with the GPU: counters of Nsight Compute, a diagnosis of each, a roofline.

`profiling` goes from what a user asks to a report. `ncu` finds and runs the profiler, `counters` reads its CSV,
`tracing` takes times by torch.profiler. `diagnosis` judges one kernel, without a GPU. `report` makes the table,
`plotting` (the only importer of matplotlib) the roofline.
"""
