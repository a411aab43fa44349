"""Eight simulated CPU devices, and the same examples in every run."""

import os

# Before JAX starts. jax before 0.12 sizes its thread pool by this, and collectives among more simulated devices than
# threads wait for each other for ever.
os.environ["PJRT_NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)

# A compiled function runs in milliseconds and compiles in a second, so that a deadline would only measure compiling.
hypothesis.settings.register_profile("few", deadline=None, max_examples=8)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("few"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "few")
