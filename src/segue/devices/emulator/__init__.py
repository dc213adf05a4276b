"""The emulator: CUDA-graph semantics on CPU tensors, for correctness and never for speed.

A segment is a tape of the ATen ops that ran while it was recorded, baked to addresses in an emulated graph pool. Like a
CUDA graph it runs none of the user's Python when launched, reads inputs where they were, and overwrites its own memory.
It refuses what CUDA refuses while a stream captures, and sees what CUDA hides.
"""

from segue.devices.emulator.device import Emulator
from segue.devices.emulator.pool import EmulatedPool
from segue.devices.emulator.recording import EmulatedRecording
from segue.devices.emulator.tape import EmulatedSegment

__all__ = ["EmulatedPool", "EmulatedRecording", "EmulatedSegment", "Emulator"]
