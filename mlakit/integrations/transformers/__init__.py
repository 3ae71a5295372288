"""The MLA models of transformers on mlakit's ops and its paged latent cache, for inference.

    from mlakit.integrations.transformers import patch, unpatch

    patch(model)     # generate() and forward() as before
    unpatch(model)

    register()       # then: from_pretrained(folder, attn_implementation="mlakit")

transformers has two places for it, so `patch` replaces no forward of a model: the attention
function (`AttentionInterface`), and `expand_kv`, the method of an MLA module that expands cached
latents to K and V. Projections, norms, RoPE, gates and the indexer stay the model's.

    patching.py      patch, unpatch, refresh_weights
    layer_classes.py  the classes of models that are made on mlakit, without a patch
    step_hooks.py    the hooks on the decoder that begin a step and commit it
    columns.py       which columns of a padded batch are tokens, and what a step adds
    pool.py          LatentPool: sequences of a batch in the pages of one cache
    cache_layers.py  the layers that a DynamicCache gets
    attention.py     the attention and the mask function
    selected_columns.py  what an indexer selected, of models that make a mask of it
    v4_pool.py       V4Pool: the rows of DeepSeek-V4
    v4_attention.py  its attention function, and the forward of its compressors
    v4_hooks.py      its cache layers and step hooks
    static_cache.py  StaticLatentCache, for torch.compile
    continuous.py    generate_batch
    checks.py        what is refused, and why
    generation.py    mlakit generate: a local checkpoint, timed; command.py prints it
"""

from mlakit.integrations.transformers.patching import (
    patch,
    refresh_weights,
    register,
    unpatch,
    unregister,
)

__all__ = ["patch", "refresh_weights", "register", "unpatch", "unregister"]
