"""Finds the fastest tile of a stage on this GPU.

``stages.py`` has the stages whose tile ``flash-delta-dev tune`` chooses, each with its true outputs. The stages of
hand-written kernels are in ``stages_hopper.py``. Run them by
``flash-delta-dev tune scan_gradients --module workshop.tune.stages_hopper``.
"""
