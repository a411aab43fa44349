"""The user's own step over the workers."""

from jaxcomm.foreign.data_parallel import DataParallel, data_parallel

__all__ = ["DataParallel", "data_parallel"]
