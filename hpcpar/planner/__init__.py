"""Formulas of shapes, memory, traffic and time: pure, the one home of each.

shapes        sizes of a model and of a pipeline stage, parameters and FLOPs
memory        model state by stage of ZeRO
traffic       bytes sent on each axis
muon          FLOPs and bytes of the step on whole matrices
activations   bytes kept from forward for backward

Predictions for `hpcpar plan`, each on top of the one before:

model_shapes  a model's matrices, from a preset, a config.json or a TOML file
cluster       a machine: devices, links, hosts; machines/ has descriptions
strategy      what a run decides: layout, batch, sharding, schedule, recomputation
software      what the program that runs it does
kernels       seconds of a matrix product, an elementwise pass, a collective
layer_time, pipeline_time, optimizer_time, step_time   seconds of each, and of a step by part
stages, stage_memory   layers of each stage, and its memory by purpose
estimate      all of it for one model, machine and strategy
"""
