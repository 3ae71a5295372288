"""`mlakit bench`: benchmark suites by name. A suite prints no times if a result is wrong.

command      turns the options into suites, workloads and a run
suite        checks, times and reports each workload: the same steps for every suite
measure      the timing protocol; independent of the ops; `gpu_timers` holds the GPU timers
correctness  compares results with the float64 oracle; `step_checks` whole steps
steps        the suites of whole steps, whose stages are in `step_stages`
problems     the tensors that peers get in the GPU suites
peers        other libraries (FlashMLA, FA3, FlashInfer, ...), timed where they are installed
shapes       parses batch shapes of the command line
ceilings     measures the bandwidth and the peak FLOP/s of the GPU
environment  records the machine and the versions
report       rows, JSON, CSV; `tables` and `heatmap` print them, `charts` draws them
busy         the suite cpu on a loaded machine
compare      what changed since another report
decode, …    the workloads of the suite of that name
"""

GPU_SUITES = (
    "decode",
    "sparse-prefill",
    "sparse-decode",
    "prefill",
    "prefill-fp8",
    "prefill-grid",
    "norm-rope-quant",
    "compress-rows",
    "indexer",
    "branch",
    "long-context",
    "sparse-step",
    "layer",
    "fp8",
    "grid",
    "transformers",
    "transformers-v4",
    "vllm",
)
# run only if named: a grid takes as long as the others together, a model needs transformers, and
# the calls of a plugin are those of the ops
ONLY_IF_NAMED = ("grid", "prefill-grid", "transformers", "transformers-v4", "vllm")
STEP_SUITES = ("branch", "long-context", "sparse-step", "layer")  # in the module `steps`
GRAPH_SUITES = ("layer",)  # timed in CUDA graphs without --mode
WALL_SUITES = ("transformers", "transformers-v4")  # timed by the host's clock without --mode
SUITES = (*GPU_SUITES, "cpu")
