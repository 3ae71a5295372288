"""Serving beyond one GPU: `mlakit vllm-args` and `mlakit plan-cluster`.

    weights.py        the weights of a model, by its checkpoint or its config
    room.py           the memory that a GPU has for the cache
    serve.py          the `vllm serve` line for a model and a number of GPUs
    kernel_times.py   the time of the attention kernels, interpolated between measured ones
    h200.json         these measured times: a copy of figures in docs/data
    simulation.py     the time of a decode step per tensor and context parallel degree
    report.py         tables and the chart

All of it is computed on the host: nothing is started, and no GPU is needed.
"""
