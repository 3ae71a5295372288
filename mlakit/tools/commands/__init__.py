"""The commands of `mlakit`, by topic. `mlakit.tools.cli` puts them together.

    run.py      demo, generate, tiny, accuracy
    bench.py    bench
    kernels.py  explain, support
    models.py   memory, plan, warmup
    checks.py   doctor, check, emulate

A module parses arguments; the work is done in other modules, which it imports when a command runs.
"""
