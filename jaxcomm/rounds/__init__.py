"""Workers that are not one program: training whose rounds are a log in an object store."""

from jaxcomm.rounds.make import rounds
from jaxcomm.rounds.worker import Worker

__all__ = ["Worker", "rounds"]
