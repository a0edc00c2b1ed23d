"""Decode throughput of a slice of a real model, resident against offloaded, on one GPU.

    scripts/bench_slice --model glm-5.2 --json FILE          both sides at their batch sweeps
    scripts/bench_slice --model v4-flash --modes offloaded --batches 64,max --overlap followers
    scripts/bench_slice --sweep all --json FILE              all committed figures (`sweeps`)
    scripts/bench_slice --model tiny                         all of it on a CPU, in seconds

A slice is whole selection groups of the model at their real sizes: projections, the indexer with
FP8 keys of all positions and a top-k, sparse attention, and the experts that one of two ranks has.
Weights are random. They would select without locality, so selections come from drift traces
(`benchmarks.traces`) while the indexer runs and is timed. A step is a CUDA graph between `publish`
and `record_read`, which run as in an engine.

A step's time is that between the ends of two steps on the GPU. Its parts are measured in a second
capture of the step, which records events between them; `flush` is what a publish leaves on the GPU,
flush, patch and copies of selections. Left out, on both sides alike: rotary embeddings, biases,
DeepSeek-V4's hyper-connections and the rings of its compressors' states.
"""
