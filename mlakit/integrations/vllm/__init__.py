"""mlakit under vLLM: attention backends for MLA models, as a plugin that vLLM loads itself.

    vllm serve DeepSeek-V2-Lite --attention-backend MLAKIT

pip installs an entry point of the group `vllm.general_plugins`; vLLM calls it in every process.

    plugin.py    register(): the entry point; imports neither torch nor vLLM until it is called
    seams.py     everything that depends on the release of vLLM: names, paths, conditions
    calls.py     vLLM's tensors into mlakit's ops, without an import of vLLM
    selection.py the same for a step of the indexer
    cached_layer.py  the arguments and the cache of a layer of either backend
    dense.py     MLAKIT, for models without an indexer
    sparse.py    MLAKIT_SPARSE, for models with one
    prefill.py   MLAKIT among the prefill backends: expanded attention
    indexer.py   the lightning indexer of models that run on MLAKIT_SPARSE
"""
