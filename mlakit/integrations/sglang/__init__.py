"""mlakit under SGLang: an attention backend for MLA models, as a plugin that SGLang loads itself.

    sglang serve --model-path deepseek-ai/DeepSeek-V2-Lite --attention-backend mlakit

pip installs an entry point of the group `sglang.srt.plugins`; SGLang calls it in every process.

    plugin.py   register(): the entry point; imports neither torch nor SGLang until it is called
    seams.py    everything that depends on the release of SGLang: names, paths, conditions
    calls.py    SGLang's tensors into mlakit's ops, without an import of SGLang
    backend.py  models whose every token attends to all tokens before it
    sparse.py   models with a lightning indexer, and the selection of that indexer
    drafts.py   the decode of draft models
"""
