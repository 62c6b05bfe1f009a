"""Formulas of shapes, memory, traffic and activations: pure, the one home of each.

shapes        sizes of a model and of a pipeline stage, parameters and FLOPs
memory        model state by stage of ZeRO
traffic       bytes sent on each axis
expert_traffic   values between the ranks of ep, from measured counts
activations   bytes kept from forward for backward
"""
