"""Reference backends in pure torch: over torch.distributed, and virtual ranks in one process."""

from ubep_backends.reference.distributed import DistributedBackend as Backend
from ubep_backends.reference.virtual import VirtualBackend

__all__ = ["Backend", "VirtualBackend"]
