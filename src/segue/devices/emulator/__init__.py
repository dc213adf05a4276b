"""The emulator: CUDA-graph semantics on CPU tensors, for correctness and never for speed.

A segment is a tape of the ATen ops that ran while it was recorded, with addresses in an emulated graph pool baked in. Like
a CUDA graph, a segment runs none of the user's Python when it is launched, reads inputs where they were, and overwrites its
own memory. The emulator refuses what CUDA refuses while a stream captures, and notices what CUDA does not: external tensors
that were freed or moved.
"""

from segue.devices.emulator.device import Emulator
from segue.devices.emulator.pool import EmulatedPool
from segue.devices.emulator.recording import EmulatedRecording
from segue.devices.emulator.tape import EmulatedSegment

__all__ = ["EmulatedPool", "EmulatedRecording", "EmulatedSegment", "Emulator"]
