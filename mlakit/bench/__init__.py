"""`mlakit bench`: suites of measurements, by name. A suite is silent where a result is wrong.

measure      the timing protocol; knows no op
environment  what the figures depend on
report       rows, the table, JSON; runs nothing
suite        gate, time, report: what every suite does
cpu          the workloads of the suite `cpu`
problems     what a contender of the GPU suites is given
peers        rivals that run beside mlakit where they are present
"""
