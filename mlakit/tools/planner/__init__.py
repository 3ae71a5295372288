"""`mlakit plan`: how many GPUs serve a model, with which TP and DCP, and by which arguments.

    weights.py   the bytes of a model's weights, by its checkpoint or its config
    times.py     the time of attention, from measured times of the kernels
    h200.json    these times, from figures in docs/data
    plan.py      the candidates, the one that is chosen, and its `vllm serve` lines
    command.py   the command: its arguments and its table

All of it is computed on the host: nothing is started, and no GPU is needed.
"""
