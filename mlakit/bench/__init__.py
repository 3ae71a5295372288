"""`mlakit bench`: suites of measurements, by name. A suite is silent where a result is wrong.

command      what the options ask for: which suites, which files are written
suite        gate, time, report: what every suite does
measure      the timing protocol; knows no op; `gpu_timers` has a GPU's clocks
gate         holding results to the oracle
problems     what a contender of the GPU suites is given
peers        rivals that run beside mlakit where they are present
shapes       batches as they are written on the command line
ceilings     what the GPU can do at most
environment  what the figures depend on
report       rows, JSON, CSV; `tables` and `heatmap` for people, `html` and `charts` for browsers
busy         the suite cpu beside busy processes
compare      what moved since another report
decode, …    the workloads of the suite of that name
"""

GPU_SUITES = (
    "decode",
    "sparse-prefill",
    "sparse-decode",
    "prefill",
    "norm-rope-quant",
    "indexer",
    "branch",
    "fp8",
    "grid",
)
SUITES = (*GPU_SUITES, "cpu")
