"""CUDA: segments are ``torch.cuda.CUDAGraph`` objects in one memory pool, recorded on one capture stream per device.

``torch.cuda.graph`` synchronises and empties the cache for every graph, so ``capture_begin`` and ``capture_end`` are driven
directly. What torch does not offer in public goes through :mod:`segue._torch`.
"""

from segue.devices.cuda.device import CudaDevice

__all__ = ["CudaDevice"]
