"""Triton kernels of a plan iteration, one per file, each with its plain-torch reference beside it.

Nothing here is imported before ``backend="triton"`` is used: `epoch_moe` itself never loads triton. Every kernel is a
`torch.library` op ``epoch_moe::<name>`` with a fake implementation, so that compiled and fake forwards pass through it.
"""
