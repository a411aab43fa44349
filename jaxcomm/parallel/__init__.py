"""Workers, on a mesh or simulated: meshes, the placement of the state, and the train steps."""

from jaxcomm.parallel.chain import chain
from jaxcomm.parallel.data_parallel import DataParallel, data_parallel
from jaxcomm.parallel.mesh import make_mesh
from jaxcomm.parallel.resize import resize_workers
from jaxcomm.parallel.state import TrainState, global_params, state_specs
from jaxcomm.parallel.step import TrainStep

__all__ = [
    "DataParallel",
    "TrainState",
    "TrainStep",
    "chain",
    "data_parallel",
    "global_params",
    "make_mesh",
    "resize_workers",
    "state_specs",
]
