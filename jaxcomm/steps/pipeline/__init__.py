"""A model in stages, each on its own device: the pipeline, its train step, and the proof of its bytes."""

from jaxcomm.steps.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
