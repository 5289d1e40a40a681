"""Checks of the device operators against their references, shared by every way to run them.

The same checks run on the torch path, on the Triton kernels in the interpreter, and on a GPU.
"""
