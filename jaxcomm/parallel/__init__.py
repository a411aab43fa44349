"""Workers on a mesh, or simulated: meshes, the state's placement, the train step."""

from jaxcomm.parallel.chain import chain
from jaxcomm.parallel.data_parallel import DataParallel, data_parallel
from jaxcomm.parallel.mesh import make_mesh
from jaxcomm.parallel.pipeline import Pipeline
from jaxcomm.parallel.pipeline_report import PipelineReport, pipeline_report
from jaxcomm.parallel.resize import resize_workers
from jaxcomm.parallel.state import TrainState, global_params, state_specs
from jaxcomm.parallel.step import TrainStep
from jaxcomm.parallel.train_step import make_train_step, simulate

__all__ = [
    "DataParallel",
    "Pipeline",
    "PipelineReport",
    "TrainState",
    "TrainStep",
    "chain",
    "data_parallel",
    "global_params",
    "make_mesh",
    "make_train_step",
    "pipeline_report",
    "resize_workers",
    "simulate",
    "state_specs",
]
