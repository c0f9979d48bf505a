"""How text becomes tokens: one encoder for training, evaluation, samples, server and exports; chat templates."""
