"""Names of the parts of an exchange in profiles and compiled programs, for `jax.named_scope`.

They appear in an operation's `op_name`. A part may be inside another (an owner of a region selects again while it
decodes): an operation belongs to the last part in its name. Operations under `jaxcomm.exchange.SCOPE` and in no part
accumulate the gradient, check it and update the residual.
"""

SELECT = "jaxcomm/select"  # which coordinates travel, and their slots
ENCODE = "jaxcomm/encode"  # values and positions into words, matrices into factors
EXCHANGE = "jaxcomm/exchange"  # the collectives
DECODE = "jaxcomm/decode"  # words into values and positions, and their sum over the workers
