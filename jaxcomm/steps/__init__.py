"""Train steps: workers on a mesh or simulated, sharded parameters, stages of a pipeline."""

from jaxcomm.steps.make import make_train_step, simulate
from jaxcomm.steps.mesh import make_mesh
from jaxcomm.steps.pipeline import Pipeline
from jaxcomm.steps.step import TrainStep

__all__ = ["Pipeline", "TrainStep", "make_mesh", "make_train_step", "simulate"]
