"""`mlakit memory`: the bytes of a model's KV cache, and how many tokens fit on a GPU.

    layers.py   the layers of a model that have a latent cache and an index-key cache
    sizes.py    the bytes of one kind of cache
    compressed.py  those of DeepSeek-V4, whose rows stand for several tokens
    budget.py   bytes per token, per rank and per request; what fits; the table

All sizes are computed: no cache is allocated and no GPU is needed.
"""
