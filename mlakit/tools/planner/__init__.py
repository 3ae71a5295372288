"""`mlakit plan`: how many GPUs serve a model, with which TP and DCP, and by which arguments.

    weights.py   the weights of a model, by its checkpoint or its config
    times.py     the time of a decode step, from measured times of the attention kernels
    h200.json    these times, from figures in docs/data
    plan.py      the candidates, the one that is chosen, and its `vllm serve` lines
    command.py   the command: its arguments and its table

All of it is computed on the host: nothing is started, and no GPU is needed.
"""
