"""Names under which profiles and compiled programs show the parts of an exchange: those of `jax.named_scope`.

They stand in an operation's `op_name`. A part may be within another (an owner of a region selects again while it
decodes): an operation belongs to the last of them in its name. What is under `jaxcomm.exchange.SCOPE` and in none of
them accumulates the gradient, checks it and keeps the residual.
"""

SELECT = "jaxcomm/select"  # which coordinates travel, and their slots
ENCODE = "jaxcomm/encode"  # values and positions into words, matrices into factors
EXCHANGE = "jaxcomm/exchange"  # the collectives
DECODE = "jaxcomm/decode"  # words into values and positions, and their sum over the workers
