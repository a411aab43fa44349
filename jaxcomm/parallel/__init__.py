"""Workers on a mesh, or simulated: meshes, the state's placement, the train step."""

from jaxcomm.parallel.chain import chain
from jaxcomm.parallel.hybrid import make_hybrid_step, make_partitioned_step
from jaxcomm.parallel.hybrid_state import hybrid_state_shapes, init_hybrid_state
from jaxcomm.parallel.mesh import make_mesh
from jaxcomm.parallel.pipeline import Pipeline
from jaxcomm.parallel.pipeline_step import init_pipeline, make_pipeline_step, pipeline_model_state, pipeline_params
from jaxcomm.parallel.resize import resize_workers
from jaxcomm.parallel.state import TrainState, global_params, init_state, state_shardings, state_specs
from jaxcomm.parallel.step import make_train_step, simulate
from jaxcomm.parallel.unreduced import make_unreduced_step

__all__ = [
    "Pipeline",
    "TrainState",
    "chain",
    "global_params",
    "hybrid_state_shapes",
    "init_hybrid_state",
    "init_pipeline",
    "init_state",
    "make_hybrid_step",
    "make_mesh",
    "make_partitioned_step",
    "make_pipeline_step",
    "make_train_step",
    "make_unreduced_step",
    "pipeline_model_state",
    "pipeline_params",
    "resize_workers",
    "simulate",
    "state_shardings",
    "state_specs",
]
