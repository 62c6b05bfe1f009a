"""Formulas of shapes, memory, traffic and activations: pure, the one home of each.

shapes        sizes of a model and of a pipeline stage, parameters and FLOPs
memory        model state by stage of ZeRO
traffic       bytes sent on each axis
activations   bytes kept from forward for backward
"""
